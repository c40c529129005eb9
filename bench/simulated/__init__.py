"""The real SGLang server with simulated schedulers: no GPU, no weights, real everything else."""
