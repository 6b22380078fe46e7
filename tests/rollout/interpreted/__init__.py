"""vLLM's runner and the short way on a CPU: their Triton kernels by Triton's interpreter, in a process of their own."""
