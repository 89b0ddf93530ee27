"""Builds pyckpt._C with CMake and Ninja. Metadata is in pyproject.toml.

Without any working C++ compiler the package installs all the same, records the fact, and runs on its reference
backend; a compile that fails for another reason fails the install.

Environment:
    CXX               the compiler; default: c++, g++ or clang++, the first that works
    PYCKPT_CUDA       CUDA kernels: "auto" (default: where an nvcc is found), "on" (an error where there is none), "off"
    PYCKPT_CUDA_ARCHS architectures to compile them for; default: TORCH_CUDA_ARCH_LIST, else "80;90;100+PTX"
    CUDACXX           nvcc; default: that of the toolkit
    CUDA_HOME         the toolkit, or CUDA_PATH; default: nvcc on PATH, /usr/local/cuda, or the package nvidia-cuda-nvcc
    PYCKPT_SANITIZE   sanitizers to build the kernels with, for example "address,undefined" (make sanitize)
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
NO_COMPILER = "_no_compiler.txt"


def find_compiler() -> tuple[str | None, str]:
    """The C++ compiler CMake would use, if it can compile an empty program, and why not otherwise."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    reasons = []
    for candidate in candidates:
        command = candidate.split()
        path = shutil.which(command[0])
        if path is None:
            reasons.append(f"{candidate}: not found")
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "empty.cpp")
            source.write_text("int main() { return 0; }\n")
            program = source.with_suffix("")
            compile_it = [path, *command[1:], str(source), "-o", str(program)]
            result = subprocess.run(compile_it, capture_output=True, text=True)
            if result.returncode == 0 and program.exists():
                return candidate, ""
        message = result.stderr.strip() or f"exit code {result.returncode}"
        reasons.append(f"{candidate}: cannot compile an empty program ({message})")
    return None, "; ".join(reasons)


class CMakeBuild(build_ext):
    """Configures and builds csrc/, leaving the module where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        package = target.parent
        package.mkdir(parents=True, exist_ok=True)
        marker = package / NO_COMPILER
        marker.unlink(missing_ok=True)
        compiler, reason = find_compiler()
        if compiler is None:
            target.unlink(missing_ok=True)
            marker.write_text(reason + "\n")
            print(
                f"pyckpt: no C++ compiler ({reason}). Installing without native kernels: the reference backend "
                "will be used. Install g++ or clang++ and reinstall for the fast one.",
                file=sys.stderr,
            )
            return

        import pybind11

        # Editable installs get a new build_temp each time: one of our own lets the next compile only what has changed.
        lasting = ROOT / "build" / f"editable-{sys.implementation.cache_tag}"
        build = lasting if self.editable_mode else Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        # What an earlier build found may be gone (tools of an isolated environment) or not be asked for any more (CXX).
        # Objects stay, unlike with cmake --fresh.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        for found in build.glob("CMakeFiles/[0-9]*"):
            shutil.rmtree(found)
        configure = [
            *("cmake", "-G", "Ninja", "-S", str(ROOT / "csrc"), "-B", str(build)),
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPYCKPT_VERSION={self.distribution.get_version()}",
            f"-DPYCKPT_SANITIZE={os.environ.get('PYCKPT_SANITIZE', '')}",
            f"-DPYCKPT_CUDA={os.environ.get('PYCKPT_CUDA') or 'auto'}",
            f"-DPYCKPT_CUDA_ARCHS={os.environ.get('PYCKPT_CUDA_ARCHS', '')}",
        ]
        for command in (configure, ["cmake", "--build", str(build)]):
            if subprocess.run(command, env={**os.environ, "CXX": compiler}).returncode:
                raise CompileError(f"building pyckpt's native module failed, see above: {' '.join(command)}")
        if not target.exists():
            raise CompileError(f"the build ended without {target}")

    def get_outputs(self) -> list[str]:
        # Either the module or the record of why there is none; both must reach the wheel.
        return [path for output in super().get_outputs() for path in self._built(Path(output))]

    def _built(self, module: Path) -> list[str]:
        return [str(path) for path in (module, module.parent / NO_COMPILER) if path.exists()]

    def copy_extensions_to_source(self) -> None:
        """For editable installs: the module is built into the checkout's package directory."""
        for ext in self.extensions:  # get_ext_fullpath() would name the place in the checkout here
            built = Path(self.build_lib, self.get_ext_filename(ext.name)).resolve()
            for path in (built, built.parent / NO_COMPILER):
                installed = ROOT / "pyckpt" / path.name
                installed.unlink(missing_ok=True)  # never written into: a process may have it loaded
                if path.exists():
                    shutil.copy2(path, installed)


setup(ext_modules=[Extension("pyckpt._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
