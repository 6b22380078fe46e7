"""Short steps of vLLM's model runner: three CUDA graphs for a step in which every answer grows by one token."""
