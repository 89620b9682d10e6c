"""Stands in for SGLang's kernel wheels, which hold CUDA code only.

SGLang imports kernels by name wherever it might need one, and calls none of them with the
torch_native attention backend and the pytorch sampling backend. It takes other submodules' absence
as a word that they are not there.
"""

import absent

absent.install("sgl_kernel", ("speculative", "mamba", "kvcacheio"))
