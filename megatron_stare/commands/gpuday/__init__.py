"""`gpuday`: the acceptance kit of a GPU machine (docs/first_gpu_day.md)."""
