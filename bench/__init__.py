"""Benches, one script a question, and the simulated scheduler that the demo and the tests use."""
