"""csrc/cuda.cmake: which nvcc is taken, for which architectures, and that nothing that is wrong with it is passed over.

A script stands in for nvcc, so that no toolkit is needed.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
pytestmark = [
    pytest.mark.skipif(
        not (ROOT / "pyproject.toml").exists(), reason="these tests were copied out of the checkout"
    ),
    pytest.mark.skipif(CMAKE is None, reason="no CMake"),
]

PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(test LANGUAGES NONE)
set(CMAKE_CXX_COMPILER c++)
include({csrc}/cuda.cmake)
message(STATUS "Definitions: ${{CUDA_DEFINITIONS}}")
message(STATUS "Objects: ${{CUDA_OBJECTS}}")
message(STATUS "Libraries: ${{CUDA_LIBRARIES}}")
"""
NVCC = """#!/bin/sh
case "$*" in
*--dryrun*) echo "#\\$ TOP={toolkit}" >&2;;
*--version*) echo "Cuda compilation tools, release {version}, V{version}.7";;
*) {compile}; echo "$*" >> {toolkit}/calls;;
esac
"""


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def toolkit(folder, *, version="13.0", compile=":", cudart=True):
    """A CUDA toolkit whose nvcc compiles nothing."""
    executable(
        folder / "bin" / "nvcc", NVCC.format(toolkit=folder.resolve(), version=version, compile=compile)
    )
    (folder / "lib64").mkdir()
    if cudart:
        (folder / "lib64" / "libcudart_static.a").touch()
    return folder


@pytest.fixture
def configure(tmp_path):
    """Runs CMake on a project that includes cuda.cmake; returns what it says, and whether it went well."""

    def run(cuda="auto", archs="", path=(), site=None, default=None, **environment):
        project = tmp_path / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(PROJECT.format(csrc=ROOT / "csrc"))
        python = executable(tmp_path / "bin" / "python", f"#!/bin/sh\necho {site or tmp_path}\n")
        kept = {"PATH": os.pathsep.join([*map(str, path), "/usr/bin", "/bin"]), "HOME": str(tmp_path)}
        command = [
            *(CMAKE, "-S", str(project), "-B", str(project / "build"), f"-DPYCKPT_CUDA={cuda}"),
            *(f"-DPYCKPT_CUDA_ARCHS={archs}", f"-DPython_EXECUTABLE={python}"),
            f"-DPYCKPT_CUDA_TOOLKIT={default or tmp_path / 'none'}",
        ]
        done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=100)
        return re.sub(r"\s+", " ", done.stdout + done.stderr), done.returncode == 0

    return run


def test_off(configure, tmp_path):
    said, well = configure("off", CUDA_HOME=str(toolkit(tmp_path / "cuda")))
    assert well and 'PYCKPT_NO_CUDA="PYCKPT_CUDA=off"' in said
    assert not (tmp_path / "cuda" / "calls").exists()


def test_auto_without_nvcc(configure):
    said, well = configure("auto")
    assert well and 'PYCKPT_NO_CUDA="no nvcc was found"' in said


def test_on_without_nvcc(configure, tmp_path):
    said, well = configure("on", CUDA_HOME=str(tmp_path / "nowhere"))
    assert not well and "PYCKPT_CUDA=on, but there is no nvcc" in said
    assert str(tmp_path / "nowhere") in said and "pip install nvidia-cuda-nvcc" in said


def test_neither_on_nor_off(configure):
    said, well = configure("perhaps")
    assert not well and "PYCKPT_CUDA is auto, on or off, not 'perhaps'" in said


@pytest.mark.parametrize("where", ["CUDA_HOME", "CUDA_PATH", "CUDACXX", "PATH", "default", "PyPI"])
def test_where_nvcc_is_found(configure, tmp_path, where):
    folder = toolkit(tmp_path / "site" / "nvidia" / "cu13")
    found = {
        "CUDA_HOME": lambda: configure(CUDA_HOME=str(folder)),
        "CUDA_PATH": lambda: configure(CUDA_PATH=str(folder)),
        "CUDACXX": lambda: configure(CUDACXX=str(folder / "bin" / "nvcc")),
        "PATH": lambda: configure(path=[folder / "bin"]),
        "default": lambda: configure(default=folder),
        "PyPI": lambda: configure(site=tmp_path / "site"),
    }
    said, well = found[where]()
    assert well, said
    assert "nvcc 13.0.7" in said and 'PYCKPT_CUDA="13.0.7"' in said
    assert f"Libraries: {folder / 'lib64' / 'libcudart_static.a'}" in said
    objects = re.search(r"Objects: (\S+)", said)[1].split(";")
    assert {Path(o).name for o in objects} == {
        "bindings.cpp",
        *(f"{p.stem}.cu.o" for p in (ROOT / "csrc" / "cuda").glob("*.cu")),
    }


def test_cuda_home_goes_before_path(configure, tmp_path):
    old, new = toolkit(tmp_path / "old", version="12.9"), toolkit(tmp_path / "new")
    said, well = configure(path=[old / "bin"], CUDA_HOME=str(new))
    assert well and "nvcc 13.0.7" in said


ARCHS = {  # in PYCKPT_CUDA_ARCHS or TORCH_CUDA_ARCH_LIST: compiled for, PTX of
    "": ("80,90,100", "100"),
    "90": ("90", ""),
    "80;90+PTX": ("80,90", "90"),
    "8.0 8.6, 12.0+PTX": ("80,86,120", "120"),
    "90a;100f": ("90a,100f", ""),
    "Ampere Hopper": ("80,86,90", "86,90"),
    "9.0;90;9.0+PTX": ("90", "90"),
}


@pytest.mark.parametrize("variable", ["PYCKPT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"])
@pytest.mark.parametrize("archs", ARCHS)
def test_architectures(configure, tmp_path, variable, archs):
    folder = toolkit(tmp_path / "cuda")
    if variable == "PYCKPT_CUDA_ARCHS":
        said, well = configure(
            archs=archs, CUDA_HOME=str(folder), TORCH_CUDA_ARCH_LIST="7.0" if archs else ""
        )
    else:
        said, well = configure(CUDA_HOME=str(folder), TORCH_CUDA_ARCH_LIST=archs)
    sass, ptx = ARCHS[archs]
    assert well, said
    assert f'PYCKPT_CUDA_SASS="{sass}"' in said and f'PYCKPT_CUDA_PTX="{ptx}"' in said
    (probe,) = (folder / "calls").read_text().splitlines()
    codes = re.findall(r"-gencode=arch=compute_(\w+),code=(sm|compute)_(\w+)", probe)
    assert codes == [(a, "sm", a) for a in sass.split(",")] + [(a, "compute", a) for a in ptx.split(",") if a]


@pytest.mark.parametrize(
    ("variable", "archs", "message"),
    [
        ("PYCKPT_CUDA_ARCHS", "sm_90", "PYCKPT_CUDA_ARCHS: 'sm_90' is not an architecture"),
        ("PYCKPT_CUDA_ARCHS", "7.5;8.0", "PYCKPT_CUDA_ARCHS: the kernels need compute capability 8.0"),
        ("TORCH_CUDA_ARCH_LIST", "9.0;fast", "TORCH_CUDA_ARCH_LIST: 'fast' is not an architecture"),
        ("TORCH_CUDA_ARCH_LIST", "7.0 7.5", "TORCH_CUDA_ARCH_LIST names no architecture"),
    ],
)
def test_wrong_architectures(configure, tmp_path, variable, archs, message):
    options = {"archs": archs} if variable == "PYCKPT_CUDA_ARCHS" else {variable: archs}
    said, well = configure(CUDA_HOME=str(toolkit(tmp_path / "cuda")), **options)
    assert not well and message in said


def test_torchs_list_may_name_older_gpus(configure, tmp_path):
    """It is for all extensions; images come with it set."""
    said, well = configure(CUDA_HOME=str(toolkit(tmp_path / "cuda")), TORCH_CUDA_ARCH_LIST="7.5 8.0 9.0+PTX")
    assert well and 'PYCKPT_CUDA_SASS="80,90"' in said and "not '7.5': left out" in said


@pytest.mark.parametrize("cuda", ["auto", "on"])
def test_a_compiler_that_fails_does_so_in_its_own_words(configure, tmp_path, cuda):
    """Also under auto: an nvcc that is there but does not work is no reason to build without CUDA unasked."""
    refusal = "echo \"nvcc fatal : Unsupported gpu architecture 'compute_100'\" >&2; exit 1"
    said, well = configure(cuda, CUDA_HOME=str(toolkit(tmp_path / "cuda", version="12.4", compile=refusal)))
    assert not well and "nvcc 12.4.7" in said and "cannot compile for 80, 90, 100" in said
    assert "Unsupported gpu architecture 'compute_100'" in said
    assert "PYCKPT_CUDA_ARCHS chooses other architectures" in said and "PYCKPT_CUDA=off" in said


def test_a_broken_nvcc(configure, tmp_path):
    executable(
        tmp_path / "cuda" / "bin" / "nvcc",
        "#!/bin/sh\necho 'error while loading shared libraries'; exit 127\n",
    )
    said, well = configure(CUDA_HOME=str(tmp_path / "cuda"))
    assert not well and "does not work" in said and "error while loading shared libraries" in said


def test_no_static_runtime(configure, tmp_path):
    said, well = configure(CUDA_HOME=str(toolkit(tmp_path / "cuda", cudart=False)))
    assert not well and "no libcudart_static.a" in said and "nvidia-cuda-runtime" in said
