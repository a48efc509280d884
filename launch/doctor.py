"""What is installed, what is active, what is refused and why; exit status 1 when pools cannot be served here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from importlib.metadata import PackageNotFoundError, entry_points, version

from sglang_ext import lines, plugin
from sglang_ext.config import POLICY_ENV, json_object
from sglang_ext.launch.output import size, table
from sglang_ext.launch.serve import REFERENCE_MODEL
from sglang_ext.serving.tenants import Tenants
from sglang_ext.settings import POOL_DIR_ENV, SETTINGS_ENV, settings_with
from sglang_ext.types import JsonObject

PLUGIN, PLATFORM = "sglang_ext", "sglang_ext_cpu"  # names of our entry points
_GROUPS = {PLUGIN: "sglang.srt.plugins", PLATFORM: "sglang.srt.platforms"}
_DISTRIBUTION = "sglang-ext"
_PACKAGES = (
    _DISTRIBUTION,
    "sglang",
    "torch",
    "transformers",
    "triton",
    "flashinfer-python",
    "sglang-kernel",
    "xgrammar",
)
_VARIABLES = (
    "SGLANG_PLUGINS",
    "SGLANG_PLATFORM",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    POOL_DIR_ENV,
    "SGLANG_EXT_KERNELS",
    "SGLANG_EXT_PLAIN_ATTENTION",
    POLICY_ENV,
    SETTINGS_ENV,
)

# Why our backends refuse an argument; what to set instead is in `sglang_ext.serving.checks`.
WHY = {
    "page_size": "blocks end at any token, pages do not; double_p takes it without pools, on no GPU",
    "speculative_algorithm": "drafts of other models are verified under masks that views do not describe",
    "enable_hierarchical_cache": "blocks would move to host memory and back to other slots",
    "disaggregation_mode": "keys and values are handed over as plain prefixes",
    "dp_size": "pools live in one radix tree",
    "attn_dp_size": "pools live in one radix tree, and every group of such ranks has its own",
    "pp_size": "a view needs all layers in one process",
    "dcp_size": "each rank would have the keys and values of some tokens, and views name those of all",
    "enable_lora": "without a GPU SGLang's LoRA fails, and its CUDA graphs are those of views (troubleshooting.md)",
    "quantization_param_path": "fa3 and FlashInfer do not treat the scales of such a file alike",
    "tokenizer_worker_num": "pools live in one tokenizer process",
    "enable_tokenizer_batch_encode": "it goes round the place where a request meets its pool",
    "disable_radix_cache": "blocks live in the radix tree",
    "enable_lmcache": "it stores plain prefixes",
    "enable_streaming_session": "its prefixes are in a cache of its own, which knows no blocks",
    "enable_unified_cache_external_linker": "it stores plain prefixes",
    "enable_session_radix_cache": "it is another tree",
    "prefill_attention_backend": "two backends would see two different rows",
    "decode_attention_backend": "two backends would see two different rows",
    "schedule_policy": "dfs-weight walks the tree, where a stitched prefix is no node",
    "dllm_algorithm": "views are for causal decoding",
    "enable_pdmux": "it has several attention backends, and views are planned for one",
    "enable_nvidia_megakernel": "its steps compute attention themselves, without views",
    "allow_auto_truncate": "the end of a prompt over a pool is the question",
    "smg_grpc_mode": "its server passes by the place where a request meets its pool",
    "enable_two_batch_overlap": "it cuts batches after their views are planned",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sglang-ext doctor`."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--quick", action="store_true", help="leave out what SGLang and torch must be imported for")


def versions() -> dict[str, str]:
    """Installed versions by package."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> list[dict[str, str | int]]:
    """GPUs that torch sees, with their memory in bytes."""
    import torch

    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
        for each in every
    ]


def entry_point_problems(gpu: bool | None) -> list[str]:
    """Why SGLang would not load the plugin, or the CPU platform where there is no GPU (None: it is not known)."""
    problems = []
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    chosen = os.environ.get("SGLANG_PLATFORM", "")
    for name, group in _GROUPS.items():
        points = {point.name for point in entry_points(group=group)}
        if name == PLATFORM and gpu is not False:
            continue
        if name not in points:
            problems.append(f"entry point {name} of group {group} is not installed: pip install sglang-ext")
        elif allowed and name not in allowed and not (name == PLATFORM and chosen):
            problems.append(
                f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves {name} out: add it, or unset the variable"
            )
    if chosen and chosen != PLATFORM:
        problems.append(
            f"SGLANG_PLATFORM={chosen}: SGLang then leaves out every plugin of a package whose platform is another"
            f" one, sglang_ext among them; unset it{'' if gpu else f', or set it to {PLATFORM}'}"
        )
    elif chosen and gpu:
        problems.append(f"SGLANG_PLATFORM={chosen} is for machines without a GPU, and this one has one: unset it")
    return problems


def environment_problems() -> list[str]:
    """What is wrong with our own environment variables."""
    checks = (
        lambda: json_object(os.environ.get(POLICY_ENV) or "{}", POLICY_ENV),
        lambda: settings_with({}),
        _read_tenants,
    )
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return problems


def _read_tenants() -> None:
    """ValueError where the file of tenants that the environment names is none."""
    path = json_object(os.environ.get(SETTINGS_ENV) or "{}", SETTINGS_ENV).get("tenants")
    if isinstance(path, str):
        Tenants.read(path)


def model_problems() -> list[str]:
    """Files of the small model that comes with the package, where they are missing."""
    files = [REFERENCE_MODEL / name for name in ("config.json", "tokenizer.json", "model.safetensors")]
    return [f"{file} is missing: install the package again" for file in files if not file.is_file()]


def active() -> JsonObject:
    """What SGLang has registered once its plugins are loaded: platform, attention and radix cache backends."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins

    from sglang_ext.systems.registry import systems

    load_plugins()
    kind = type(current_platform)
    return {
        "platform": f"{kind.__module__}.{kind.__qualname__}",
        "attention_backends": [name for name in systems() if name in ATTENTION_BACKENDS],
        "stock_attention_backends": sorted(set(ATTENTION_BACKENDS) - set(systems())),
        "radix_cache_backends": sorted(registered_radix_cache_backends()),
        "dead_hooks": plugin.not_installed(plugin.HOOKS),
    }


def backend_problems(found: JsonObject, gpu: bool) -> list[str]:
    """What is missing among what SGLang has registered and wrapped."""
    from sglang_ext.config import RADIX_CACHE_BACKEND
    from sglang_ext.systems.registry import systems

    problems = [
        f"attention backend {name} is not registered with SGLang"
        for name in systems()
        if name not in found["attention_backends"]
    ]
    problems += found["dead_hooks"]
    if RADIX_CACHE_BACKEND not in found["radix_cache_backends"]:
        problems.append(f"radix cache backend {RADIX_CACHE_BACKEND} is not registered with SGLang")
    if not gpu and not found["platform"].startswith("sglang_ext."):
        problems.append(f"no GPU, and SGLang's platform is {found['platform']} instead of {PLATFORM}")
    return problems


def refused() -> list[dict[str, str]]:
    """Server arguments that are refused with our backends, why, and what to do."""
    from sglang_ext.serving.checks import _REFUSED

    return [
        {"argument": "--" + name.replace("_", "-"), "why": WHY.get(name, "not supported yet"), "instead": remedy}
        for name, _, remedy in _REFUSED
    ]


def examine(quick: bool = False) -> JsonObject:
    """Everything; `problems` lists what keeps pools from being served, `warnings` what does not and should be known.

    Args:
        quick: only what needs neither SGLang nor torch: GPUs, hooks and what SGLang registers are left out.
    """
    report: JsonObject = {"versions": versions()}
    report["environment"] = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    report["embedded_model"] = str(REFERENCE_MODEL)
    found = report["versions"]["sglang"]
    if found == "not installed":
        report["problems"] = ["sglang is not installed: pip install sglang-ext"]
        return report
    problem = plugin.check_version(found)
    problems = [problem] if problem else []
    if not quick:
        report["gpus"] = devices()
        report["hooks"] = {"targets": [hook.target for hook in plugin.HOOKS], "unresolved": plugin.unresolved()}
        problems += report["hooks"]["unresolved"]
    gpu = None if quick else bool(report["gpus"])
    warning = lines.warning_on_gpus() if gpu and not problem else None
    report["warnings"] = [warning] if warning else []
    problems += entry_point_problems(gpu)
    if not quick and not problems:  # the plugin ends the process when it cannot work
        report["active"] = active()
        problems += backend_problems(report["active"], bool(gpu))
    if not quick:
        report["refused"] = refused()
    report["problems"] = problems + environment_problems() + model_problems()
    return report


def describe(report: JsonObject) -> str:
    """The report for people."""
    parts = ["versions", table(("package", "version"), list(report["versions"].items())), ""]
    if "gpus" not in report:
        parts += ["quick: GPUs, hooks and what SGLang registers were not looked at; sglang-ext doctor looks at them"]
    elif report["gpus"]:
        rows = [(each["name"], size(each["memory_bytes"]), each["capability"]) for each in report["gpus"]]
        parts += [table(("GPU", "memory", "capability"), rows)]
    else:
        parts += [f"no GPU: SGLang's engine runs on plain PyTorch ({PLATFORM}), {os.cpu_count()} cores"]
    if report["environment"]:
        parts += ["", *(f"{name}={value}" for name, value in report["environment"].items())]
    if "hooks" in report:
        hooks = report["hooks"]
        bad = len(hooks["unresolved"])
        parts += ["", f"hooks: {len(hooks['targets'])} targets in SGLang, {bad or 'none'} unresolved"]
    if "active" in report:
        live = report["active"]
        parts += [f"       {len(live['dead_hooks']) or 'none'} resolved but not installed"]
        parts += [
            "",
            f"platform:           {live['platform']}",
            f"attention backends: {', '.join(live['attention_backends'])}  (--attention-backend)",
            f"radix caches:       {', '.join(live['radix_cache_backends'])}  (--radix-cache-backend)",
        ]
    if "refused" in report:
        columns = ("argument", "why", "instead")
        rows = [tuple(each[name] for name in columns) for each in report["refused"]]
        parts += ["", "refused with these backends", table(columns, rows)]
        parts += ["and models with MLA, logit caps, or rotary embeddings not linear in position, and most of those"]
        parts += ["with windows or states: docs/models.md names some that double_p serves."]
    parts += [""]
    parts += [f"WARNING: {each}" for each in report.get("warnings", ())]
    parts += ["PROBLEMS", *(f"- {each}" for each in report["problems"])] if report["problems"] else ["all is well"]
    return "\n".join(parts)


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 when there are problems."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, about kernels it does without
        report = examine(args.quick)
    print(json.dumps(report, indent=1) if args.json else describe(report), file=sys.stdout)
    return 1 if report["problems"] else 0
