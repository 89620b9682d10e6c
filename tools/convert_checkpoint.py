"""python tools/convert_checkpoint.py {hf-to-megatron,megatron-to-hf} SOURCE TARGET:
`megatron_stare convert`.
"""

import sys

from megatron_stare.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
