"""A model of an SGLang server with DP attention: pure, no clock, no I/O.

`radix` is one rank's prefix cache, `rank` its scheduler, `steps` what a step costs, `cluster` all
ranks together in virtual time. The simulated scheduler in the real server uses the same `rank`.
"""
