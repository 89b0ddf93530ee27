"""What gets installed: the sdist, the wheel made from it, installs without a compiler or with a broken source."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pyckpt

ROOT = Path(__file__).resolve().parents[1]
# By their metadata: a mere search for the module `pip` makes setuptools give up its own distutils in this process, and Inductor
# fails after that.
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
MISSING = sorted({"setuptools", "pybind11", "cmake", "ninja", "pip"} - INSTALLED)
builds = pytest.mark.skipif(bool(MISSING), reason=f"building needs {', '.join(MISSING)}")
in_checkout = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="these tests were copied out of the checkout"
)

GELU = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, pyckpt
x = torch.tensor([-1.0, 0.0, 1.0, 3.0], requires_grad=True)
y = pyckpt.functional.gelu(x)
y.sum().backward()
torch.testing.assert_close(y, torch.nn.functional.gelu(x))
torch.testing.assert_close(x.grad, torch.tensor([-0.0833155, 0.5, 1.0833155, 1.0119457]))
print(pyckpt.__file__)
print(pyckpt.backends.select("cpu"))
print([str(w.message) for w in caught if w.category is RuntimeWarning])
"""


def run(command, *, cwd, ok=True, **environment):
    """Runs a command in a process that finds this environment's tools, but not the checkout.

    Without CUDA unless that is asked for: to compile its kernels takes minutes, and is a step of CI's own (make cuda).
    """
    scripts = str(Path(sys.executable).parent)
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX", "PYCKPT_SANITIZE")}
    environment = {
        **inherited,
        "PYCKPT_CUDA": "off",
        "PATH": scripts + os.pathsep + os.environ["PATH"],
        **environment,
    }
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def python(code, *, cwd, path, ok=True):
    """Runs code with the package at `path`. An editable install would lend it the checkout's native module."""
    alone = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]\n"
    return run([sys.executable, "-c", alone + code], cwd=cwd, ok=ok, PYTHONPATH=str(path))


def pip(*arguments, cwd, ok=True, **environment):
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    return run([sys.executable, "-m", "pip", *arguments, *options], cwd=cwd, ok=ok, **environment)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources, since a build writes beside them; to be built without optimisation, in a quarter of the time."""
    leave = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "dist", "*.egg-info", "*.so", "_no_compiler.txt", "results"
    )
    copy = Path(shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=leave))
    (copy / "setup.cfg").write_text("[build_ext]\ndebug = 1\n")
    return copy


def files_of(*folders):
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".so" and not {"__pycache__", "results"} & set(path.parts)
    }


@builds
@in_checkout
@pytest.mark.slow
def test_sdist_and_wheel_from_it(checkout, tmp_path):
    sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", sdist], cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()}
    kernels = files_of("triton_kernels")
    assert files_of("csrc", "tests", "bench", "examples", "triton_kernels") <= names
    assert {f"pyckpt/{name}" for name in kernels} <= names
    assert {"setup.py", "pyproject.toml", "Makefile", "LICENSE", "NOTICE", "README.md"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or "_no_compiler" in name]

    pip("wheel", "--wheel-dir", "wheels", archive.name, cwd=tmp_path)
    (wheel,) = tmp_path.glob("wheels/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert len([name for name in names if re.fullmatch(r"pyckpt/_C\..*\.so", name)]) == 1
    assert {"pyckpt/py.typed", "pyckpt/_C.pyi"} | {f"pyckpt/{name}" for name in kernels} <= names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "pyckpt").rglob("*.py")}
    assert sources <= names, "a module is missing from the list of packages in pyproject.toml"
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"pyckpt"}, (
        "more than pyckpt is installed"
    )
    assert any(name.endswith("licenses/LICENSE") for name in names) and any(
        n.endswith("licenses/NOTICE") for n in names
    )

    where, backend, warned = python(GELU, cwd=tmp_path, path=tmp_path / "installed").splitlines()
    assert Path(where).is_relative_to(tmp_path) and backend == "cpu" and warned == "[]"


@builds
@in_checkout
@pytest.mark.slow
def test_without_a_compiler(checkout, tmp_path):
    target = tmp_path / "installed"
    output = pip("install", "-v", "--target", str(target), str(checkout), cwd=tmp_path, CXX="/bin/false")
    assert "no C++ compiler (/bin/false: cannot compile an empty program" in output
    assert "/bin/false" in (target / "pyckpt" / "_no_compiler.txt").read_text()
    assert not list(target.glob("pyckpt/_C*.so"))
    where, backend, warned = python(GELU, cwd=tmp_path, path=target).splitlines()
    assert Path(where).is_relative_to(target) and backend == "reference"
    assert "built without a C++ compiler (/bin/false" in warned and "reinstall" in warned
    asked = python(
        'from pyckpt import backends; backends.use("cpu").__enter__()', cwd=tmp_path, path=target, ok=False
    )
    assert "RuntimeError: backend 'cpu' is not available here: built without a C++ compiler" in asked


@builds
@in_checkout
@pytest.mark.slow
def test_a_compile_error_fails_the_install(checkout, tmp_path):
    # In a header that every file includes, so that none compiles first.
    (checkout / "csrc" / "math.h").write_text("#error planted failure\n")
    output = pip("wheel", "--wheel-dir", "wheels", str(checkout), cwd=tmp_path, ok=False)
    assert re.search(r"math\.h:1:2: error:.*planted failure", output)
    assert not list(tmp_path.glob("wheels/*.whl"))


@builds
@in_checkout
@pytest.mark.slow
def test_cuda_is_built_or_refused_as_asked(checkout, tmp_path):
    """csrc/cuda.cmake (test_cuda_build.py) as an install reaches it: by the environment, and loudly."""
    nvcc = checkout / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'nvcc: planted failure'; exit 1\n")
    nvcc.chmod(0o755)
    home = {"CUDA_HOME": str(nvcc.parents[1]), "CUDACXX": ""}
    for cuda in ("auto", ""):  # an nvcc that is there has to work
        output = pip("wheel", "-w", "wheels", str(checkout), cwd=tmp_path, ok=False, PYCKPT_CUDA=cuda, **home)
        assert "does not work (PYCKPT_CUDA=off builds without CUDA)" in output
        assert "nvcc: planted failure" in output
    output = pip("wheel", "-w", "wheels", str(checkout), cwd=tmp_path, ok=False, PYCKPT_CUDA="sometimes")
    assert "PYCKPT_CUDA is auto, on or off, not 'sometimes'" in output
    assert not list(tmp_path.glob("wheels/*.whl"))

    pip("install", "--target", "off", str(checkout), cwd=tmp_path, PYCKPT_CUDA="off", **home)
    code = "from pyckpt import backends; print(backends.available()['cuda'].unavailable)"
    assert "built without CUDA: PYCKPT_CUDA=off" in python(code, cwd=tmp_path, path=tmp_path / "off")


def test_missing_module_is_an_error(tmp_path):
    """Without _C and without the record of a missing compiler, nothing may fall back to the reference."""
    leave = shutil.ignore_patterns("*.so", "__pycache__", "_no_compiler.txt", "triton_kernels")
    shutil.copytree(Path(pyckpt.__file__).parent, tmp_path / "pyckpt", ignore=leave)
    output = python("import pyckpt", cwd=tmp_path, path=tmp_path, ok=False)
    assert (
        "ImportError: pyckpt's native module could not be loaded" in output and "pip install -e ." in output
    )


@in_checkout
def test_version_is_one(native):
    written = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert written and pyckpt.__version__ == written[1] == native.build_info()["version"]


@in_checkout
def test_build_tools_of_tests_are_those_of_the_build():
    text = (ROOT / "pyproject.toml").read_text()
    tools = re.findall(r'"([^"]+)"', re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)[1])
    extra = re.findall(r'"([^"]+)"', re.search(r"^test = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)[1])
    assert tools and set(tools) <= set(extra)


@pytest.mark.alone
def test_import_is_cheap(tmp_path):
    """At most 0.2 s over torch (of processor time: the machine may be busy), and no optional package comes along. Compiled
    already, as pip leaves it: the first of the processes writes the bytecode."""
    code = (
        "import sys, time, torch\n"
        "start = time.process_time()\n"
        "import pyckpt\n"
        "print(time.process_time() - start)\n"
        "print(sorted({'transformers', 'triton', 'numpy.testing', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": str(Path(pyckpt.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": ""}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    outputs = [
        run([sys.executable, "-c", code], cwd=ROOT.anchor, **environment).splitlines() for _ in range(3)
    ]
    assert {modules for _, modules in outputs} == {"[]"}
    assert min(float(seconds) for seconds, _ in outputs) <= 0.2
