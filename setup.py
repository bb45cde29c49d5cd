"""Builds the compiled kernel; everything else is in pyproject.toml.

The kernel is required: there is no slow path in Python to fall back to, so a
machine without a compiler gets one line that names what to install.

Environment variables let other builds share this file:

    POLYBUS_CFLAGS      extra compiler flags, e.g. "-fsanitize=address -g"
    POLYBUS_LDFLAGS     extra linker flags
    POLYBUS_BUILD_DIR   where generated C, objects and (for `setup.py build`) the
                        whole built tree go; default "build"
    POLYBUS_SKIP_KERNEL set to anything: build no kernel. `make setup` links the
                        package first and compiles after, as a step of its own

`tests/asan.sh` builds an instrumented copy of the package in build/asan this
way, and leaves the one in src/ alone.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

SOURCES = Path("src")
KERNEL = SOURCES / "polybus" / "kernel"  # headers that other extensions include
# The one extension in C++; it links against the Arrow libraries inside pyarrow.
FLIGHT = "polybus.kernel.flight_port"
BUILD_DIR = Path(os.environ.get("POLYBUS_BUILD_DIR", "build"))

# -O3 unrolls and vectorises the copy loops of the fan-out. Later flags win, so
# POLYBUS_CFLAGS may lower it.
CFLAGS = ["-O3"]

DIRECTIVES = {
    "language_level": 3,
    # The kernel checks every read itself, against the end of what was received.
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "embedsignature": True,
}

# The commands that compile; others (egg_info, sdist) need no compiler.
COMPILING = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}

NO_COMPILER = (
    "polybus: no C compiler ({name}): the kernel must be compiled."
    " Install one, e.g. `apt-get install gcc libc6-dev` (or set CC)."
)
NO_CXX_COMPILER = (
    "polybus: no C++ compiler ({name}): the native port must be compiled."
    " Install one, e.g. `apt-get install g++` (or set CXX)."
)
NO_HEADERS = (
    "polybus: no Python.h in {folder}: the kernel must be compiled."
    " Install the headers, e.g. `apt-get install python3-dev`."
)


def flags(variable):
    return shlex.split(os.environ.get(variable, ""))


def compiler(variable="CC", usual="cc"):
    """The first word of the compiler command, as setuptools will run it."""
    command = os.environ.get(variable) or sysconfig.get_config_var(variable) or usual
    return shlex.split(command)[0]


def missing_tool():
    """One line that names what to install, or None when all is there."""
    if shutil.which(compiler()) is None:
        return NO_COMPILER.format(name=compiler())
    if shutil.which(compiler("CXX", "c++")) is None:
        return NO_CXX_COMPILER.format(name=compiler("CXX", "c++"))
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        return NO_HEADERS.format(folder=folder)
    return None


def extension(source):
    name = ".".join(source.relative_to(SOURCES).with_suffix("").parts)
    declarations = (path for pattern in ("*.pxd", "*.h") for path in SOURCES.rglob(pattern))
    made = Extension(
        name,
        [str(source)],
        include_dirs=[str(KERNEL)],
        depends=sorted(map(str, declarations)),
        extra_compile_args=[*CFLAGS, *flags("POLYBUS_CFLAGS")],
        extra_link_args=flags("POLYBUS_LDFLAGS"),
    )
    if name == FLIGHT:
        against_arrow(made)
    return made


def against_arrow(made):
    """Against the very libraries that pyarrow brings: they are loaded before this one is.

    They carry their version in their names, so another pyarrow at run time is noticed.
    """
    import pyarrow

    folder = Path(pyarrow.__file__).parent
    made.language = "c++"
    made.include_dirs.append(pyarrow.get_include())
    made.extra_compile_args.append("-std=c++20")
    for name in ("libarrow_flight.so", "libarrow_python.so", "libarrow.so"):
        made.extra_link_args.append(str(max(folder.glob(f"{name}.*00"))))


def kernel_extensions():
    if "POLYBUS_SKIP_KERNEL" in os.environ:
        return []
    return [extension(source) for source in sorted(SOURCES.rglob("*.pyx"))]


def translate(extensions, force):
    """Turn each extension's .pyx into C, where it changed since the last time."""
    from Cython.Build import cythonize
    from Cython.Compiler.Errors import CompileError as TranslateError

    try:
        translated = cythonize(
            extensions,
            build_dir=str(BUILD_DIR / "cython"),
            include_path=["src"],
            compiler_directives=DIRECTIVES,
            force=force,
            quiet=True,
        )
    except TranslateError as error:
        sys.exit(f"polybus: the kernel did not compile: {error}")
    for ours, theirs in zip(extensions, translated, strict=True):
        ours.sources = theirs.sources


class BuildKernel(build_ext):
    """build_ext that translates first, compiles in parallel, and ends in one line.

    Translation happens here, not when setup() is called: asking for the
    package's metadata needs neither Cython nor a kernel without mistakes.
    """

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self):
        translate(self.extensions, self.force)
        try:
            super().build_extensions()
        except CCompilerError as error:
            sys.exit(f"polybus: the kernel did not compile: {error}")


# Asked before anything else is done: the answer is then not the last line of pages.
if COMPILING & set(sys.argv) and kernel_extensions() and (problem := missing_tool()):
    sys.exit(problem)

setup(
    ext_modules=kernel_extensions(),
    cmdclass={"build_ext": BuildKernel},
    options={"build": {"build_base": str(BUILD_DIR)}},
)
