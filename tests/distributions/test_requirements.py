"""Each distribution requires every package that it imports, and each image installs everything that it needs."""

import functools
import importlib.metadata
import re
import sys

import pytest
import wooly
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributions.distributions import ALL, ROOT, VERSION

#: Modules that need an extra: name of the distribution, prefix of the module, extra.
OF_EXTRAS = (
    ("wooly-bus", "wooly_bus.http_listener", "http"),
    ("wooly-bus", "wooly_bus.http_front", "http"),
    ("wooly", "wooly.triton_capture", "triton"),
)
#: Optional packages that a distribution looks for at run time; each with the reason why no requirement names it.
LOOKED_FOR = {
    ("wooly-compiler", "cuda"): "NVRTC's bindings, for NVIDIA's chips alone: the extra cuda",
    ("wooly-compiler", "hip"): "hipRTC's bindings, for AMD's chips alone: the extra rocm",
    ("wooly-executor", "cuda"): "the driver's bindings, for NVIDIA's chips alone: the extra cuda",
    ("wooly-executor", "pynvml"): "NVML, whose figures are compared with bills in the log where it is installed",
    ("wooly-executor", "hip"): "the driver's bindings, for AMD's chips alone: the extra rocm",
}


#: Programs that load a distribution as their plugin; each with the reason why no requirement names it.
HOSTS = {
    ("wooly-vllm", "vllm"): "each release of vLLM pins a release of PyTorch, so it is installed first",
    ("wooly", "bitsandbytes"): "it is adapted when a script imports it",
}


@functools.cache
def providers():
    """The distributions that have each package, by the package's name."""
    found = importlib.metadata.packages_distributions()
    return {package: {canonicalize_name(d) for d in ds} for package, ds in found.items()} | {
        d.package: {d.name} for d in ALL.values()
    }


def extra_of(module):
    """The distribution and the extra that one of our modules needs; None for other modules."""
    return next(((d, extra) for d, prefix, extra in OF_EXTRAS if f"{module}.".startswith(f"{prefix}.")), None)


def names(requirements):
    return {canonicalize_name(r.name) for r in requirements}


@pytest.mark.parametrize("distribution", ALL.values(), ids=ALL)
def test_distribution_requires_all_imported_packages(distribution):
    missing = set()
    for found in distribution.imports:
        if found.package in sys.stdlib_module_names or found.package == distribution.package:
            continue
        if (distribution.name, found.package) in LOOKED_FOR and not found.always:
            continue
        if (distribution.name, found.package) in HOSTS:
            continue
        declared = names(distribution.required)
        own = extra_of(found.importer)
        if own is not None:
            declared |= names(distribution.extras[own[1]])
        elif not found.always:
            declared |= {n for rs in distribution.extras.values() for n in names(rs)}
        if not providers().get(found.package, set()) & declared:
            missing.add(f"{found.importer}:{found.line} imports {found.package}")
    assert not missing, f"{distribution.folder}/pyproject.toml has no requirement with these packages"


@pytest.mark.parametrize("distribution", ALL.values(), ids=ALL)
def test_distribution_requires_extras_of_imported_modules(distribution):
    asked = {(canonicalize_name(r.name), extra) for r in distribution.required for extra in r.extras}
    needed = {extra_of(found.module) for found in distribution.imports if found.package != distribution.package}
    assert needed - {None} <= asked


@pytest.mark.parametrize("distribution", ALL.values(), ids=ALL)
def test_distribution_pins_release_version(distribution):
    made = ProjectMetadata(str(distribution.folder), PluginManager())
    assert made.core.version == VERSION
    extras = [r for rs in made.core.optional_dependencies.values() for r in rs]
    ours = [r for r in map(Requirement, [*made.core.dependencies, *extras]) if r.name in ALL]
    assert {str(r.specifier) for r in ours} <= {f"=={VERSION}"}
    wanted = names([*distribution.required, *[r for rs in distribution.extras.values() for r in rs]]) & ALL.keys()
    assert {r.name for r in ours} == wanted


DOCKERFILES = [p for p in sorted((ROOT / "deploy/docker").glob("*.Dockerfile")) if p.name != "base.Dockerfile"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda p: p.name)
def test_image_copies_all_required_distributions(dockerfile):
    """No index has Wooly's distributions, so pip cannot build an image if the Dockerfile leaves one out."""
    text = dockerfile.read_text()
    by_folder = {d.folder.relative_to(ROOT).as_posix(): d for d in ALL.values()}
    installed = {by_folder[f].name for f in re.findall(r"[ '\"]\./([\w/-]+)", text)}
    needed = {n for name in installed for n in names(ALL[name].required) & ALL.keys()}
    assert installed and needed <= installed
    copied = re.findall(r"^COPY ([^-].*) /src/", text, re.M)
    places = {place for line in copied for place in line.split()}
    assert {"VERSION", "hatch_build.py", "constraints.txt"} <= places
    assert all(
        any(f"{d.folder.relative_to(ROOT)}/".startswith(f"{p}/") for p in places) for d in map(ALL.get, installed)
    )
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(any(f"!{p}".startswith(line) for line in sent if line.startswith("!")) for p in places)


@pytest.mark.parametrize(
    ("image", "languages"),
    [
        ("client", {"wooly-cuda-c"}),
        *[
            (i, {"wooly-cuda-c", "wooly-triton"})
            for i in ("compiler", "executor-cpu", "executor-cuda", "executor-rocm")
        ],
    ],
)
def test_image_contains_kernel_languages(image, languages):
    text = (ROOT / f"deploy/docker/{image}.Dockerfile").read_text()
    assert languages == {
        name for name in ("wooly-cuda-c", "wooly-triton") if f" ./libs/{name.removeprefix('wooly-')} " in text
    }


@pytest.mark.parametrize("name", ["wooly-executor", "wooly-compiler"])
def test_gpu_bindings_are_pinned_extras_that_agree(name):
    """The bindings of executor and compiler must belong to the same CUDA, or ROCm."""
    extras = {e: {canonicalize_name(r.name): r for r in rs} for e, rs in ALL[name].extras.items()}
    other = {e: {canonicalize_name(r.name): r for r in rs} for e, rs in ALL["wooly-executor"].extras.items()}
    for extra, package in (("cuda", "cuda-bindings"), ("rocm", "hip-python")):
        found = extras[extra][package]
        assert {s.operator for s in found.specifier} == {">=", "<"}
        assert found.specifier == other[extra][package].specifier


def test_executor_declares_the_compiler_that_it_starts():
    started = (ROOT / "services/executor/src/wooly_executor/runtime/builds.py").read_text()
    assert 'MODULE = "wooly_compiler.worker"' in started
    assert "wooly-compiler" in names(ALL["wooly-executor"].extras["compiler"])


def test_images_for_gpus_install_the_extras_and_no_list_of_their_own():
    for image, extra in (("executor-cuda", "cuda"), ("executor-rocm", "rocm")):
        text = (ROOT / f"deploy/docker/{image}.Dockerfile").read_text()
        assert f"'./services/executor[{extra},compiler,object-store]' './services/compiler[{extra}]'" in text
        assert not re.search(r"cuda-bindings|nvrtc|hip-python", text)
    text = (ROOT / "deploy/docker/compiler.Dockerfile").read_text()
    assert '"./services/compiler${EXTRAS}"' in text and not re.search(r"cuda-bindings|nvrtc|hip-python|triton=", text)


def test_build_script_builds_all_images_by_default():
    text = (ROOT / "deploy/docker/build.sh").read_text()
    found = re.search(r"for name in \$\{\*:-([\w -]+)\}", text)
    images = {p.name.removesuffix(".Dockerfile") for p in DOCKERFILES}
    assert found is not None and set(found[1].split()) == images | {"compiler-cuda", "compiler-rocm"}


def test_listed_missing_requirements_are_imported():
    imported = {(d.name, found.package) for d in ALL.values() for found in d.imports}
    spoken_of = {
        (d.name, word)
        for d in ALL.values()
        for p in d.sources()
        for word in re.findall(r'"(\w+)[\w.]*"', p.read_text())
    }
    assert LOOKED_FOR.keys() <= imported | spoken_of


def test_client_reports_release_version():
    assert wooly.__version__ == VERSION


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("deploy/helm/wooly/Chart.yaml", r"^(?:appV|v)ersion: (.+)$"),
        ("deploy/compose/compose.yaml", r"\$\{WOOLY_TAG:-(.+?)\}"),
        ("docs/guides/install.md", r"wooly-client:(\d[\w.]*)"),
    ],
)
def test_file_contains_release_version(path, pattern):
    assert set(re.findall(pattern, (ROOT / path).read_text(), re.M)) == {VERSION}
