"""Kernels compiled for Hopper without a GPU: what Triton's interpreter takes, its compiler may not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HOPPER_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have there."""

TYPES = {
    "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "int64": "*i64", "int8": "*i8",
    "uint8": "*u8", "float8_e4m3fn": "*fp8e4nv",
}  # fmt: skip
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_ext" / "tests" / "triton"
"""What Triton compiled is kept there, under names that are hashes of all that it depends on."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")

compiled: dict[str, Any] = {}
"""Package and name of a kernel -> what it was compiled to last."""


class _Launches:
    """Stands where a kernel is launched, and compiles it for the arguments."""

    def __init__(self, kernel: Any, shared: int, fixed: dict[str, Any]) -> None:
        self.kernel, self.shared, self.fixed = kernel, shared, fixed

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **named: Any) -> None:
        import torch
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: named.pop(name) for name in OPTIONS if name in named}
        named |= {name: value for name, value in self.fixed.items() if name in named}
        values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
        types, constants, aligned = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, values[parameter.name]
            if parameter.is_constexpr or value is None:
                types[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[name] = TYPES[str(value.dtype).removeprefix("torch.")]
            else:
                types[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, torch.Tensor) or (types[name] == "i32" and value % 16 == 0):
                aligned[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, types, constants, aligned)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert found.metadata.shared <= self.shared, (self.kernel.__name__, found.metadata.shared, named)
        compiled[self.kernel.fn.__module__.split(".")[-2] + self.kernel.__name__] = found


def stand_in(module: ModuleType, *names: str, shared: int = HOPPER_SHARED, **fixed: Any) -> None:
    """Let launches of a module's kernels compile them; AssertionError where one takes more than `shared` bytes.

    Args:
        module: where the kernels are.
        names: of the kernels.
        shared: bytes of shared memory.
        fixed: values of constants, whatever the launch says.
    """
    for name in names:
        setattr(module, name, _Launches(getattr(module, name), shared, fixed))


def gluon(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], registers: int, odd: Sequence[str] = ()
) -> Any:
    """Compile a Gluon kernel of four warps a group for Hopper.

    Args:
        kernel: with `gluon.jit`.
        types: of its arguments, as Triton writes them; "*i32" where one is not named.
        constants: values of the constexpr arguments.
        registers: of a thread, on average.
        odd: names of integers that are no multiples of 16; all others, and all addresses, are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    of = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    even = [i for i, name in enumerate(names) if (of[name][0] == "*" or of[name] == "i32") and name not in odd]
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, of, fixed, {(i,): [["tt.divisibility", 16]] for i in even})
    options = {"num_warps": 4, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check_copies(code: bytes, folder: Path) -> None:
    """AssertionError where machine code copies to an address in a uniform register under a cache policy.

    The compiler of CUDA 13.0 writes such copies (`LDGSTS [R0+UR0], desc[UR1]`), and an H200 stops at them as illegal.
    """
    import triton

    path = folder / "code.cubin"
    path.write_bytes(code)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([str(tool), str(path)], capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"LDGSTS\S* \[([^\]]*)\]", text)
    assert targets and not [each for each in targets if "UR" in each]


def run(script: str, folder: Path) -> None:
    """Run a script in a process of its own, where Triton compiles; AssertionError with its output where it fails."""
    path = folder / "compile.py"  # a file: Triton reads the source of kernels
    path.write_text(script)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(CACHE), "PYTHONPATH": root}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
