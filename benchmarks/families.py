"""Every causal language model of transformers that can be made tiny, and every model of images and text, with images
(``llava+images``), on each axis by itself, against one plain torch process.

    OMP_NUM_THREADS=1 python benchmarks/families.py [--only llama gpt2] [--axes tp pp] [--seconds 120] [--unknown]

Each family is laid out on two gloo ranks: ``dp_shard``, ``tp``, ``pp``, ``ep`` and ``cp`` = 2. Two steps in float32,
with batches of different lengths and an SGD step between them: each loss must be that of one process within 1e-5, each
gradient within 1e-4, the norm too; what rounding takes further is judged in float64, within 1e-5. Results are kept in
.cache/families.json with a hash of the sources: a run that was stopped goes on where it was, and a changed source is
judged anew (``--unknown``: only where no result is there yet). The table is docs/data/families.txt.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import image_families

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROOT = Path(__file__).resolve().parents[1]
KEPT, PAGE = ROOT / ".cache" / "families.json", ROOT / "docs" / "data" / "families.txt"
AXES = {
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2, "dp_shard": 1},
    "pp": {"pp": 2, "dp_shard": 1},
    "ep": {"dp_shard": 2, "ep": 2},
    "cp": {"cp": 2, "dp_shard": 1},
}
LENGTHS = (12, 9)
"""Tokens of a row, in each step."""
LOSS, GRADIENT, EXACT = 1e-5, 1e-4, 1e-5
SMALLEST = 1e-3
"""Of the norm of all gradients: one that is smaller is compared relative to that, since float32 computes it from
larger numbers.
"""

VOCABULARY = 96
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff"), 64
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
"""Each where the family's config has such a key."""
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
INDEXED = LATENT | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
LINEAR = ["linear_attention", "full_attention"]
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": LINEAR,
}
SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = SLIDING | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXED),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA),
    **{key: {"state_size": 4, "time_step_rank": 4} for key in ("mamba", "falcon_mamba")},
    **{key: {"rotary_dim": 4} for key in ("codegen", "gptj")},
    **{key: {"head_dim": 8} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **dict.fromkeys(("gemma3_text", "gemma4_unified_text"), SLIDING),
    "big_bird": {"attention_type": "original_full"},
    "bailing_hybrid": LATENT | {"layer_types": LINEAR},
    "bamba": SPACE | {"mamba_n_groups": 2, "attn_layer_indices": [1]},
    "cpmant": {"init_std": 0.1},
    "deepseek_v4": {"o_lora_rank": 8, "index_n_heads": 4, "index_head_dim": 8},
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": SPACE | {"mamba_n_groups": 1, "mamba_d_ssm": 64},
    "gemma3n_text": PER_LAYER | {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_text": PER_LAYER,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": SPACE
    | {"mamba_n_groups": 1, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": LATENT | {"layer_types": LINEAR, "linear_head_dim": 8, "linear_num_heads": 4},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": LATENT | {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
    "qwen4_exp_text": {key: value for key, value in DELTA.items() if key != "layer_types"},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "num_key_value_heads": 2},
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
        "enable_pronunciation": False,
        "enable_shape": False,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""A family's own keys."""
MOST_PARAMETERS = 10_000_000

Result = dict[str, Any]


def config_of(family: str) -> Any:
    """A tiny config of a family."""
    from transformers import AutoConfig

    if family.endswith(image_families.SUFFIX):
        return image_families.config_of(family, SIZES, OWN)
    kind = type(AutoConfig.for_model(family))
    default = kind()
    return kind(**{key: value for key, value in SIZES.items() if _has(default, key)} | OWN.get(family, {}))


def _has(config: Any, key: str) -> bool:
    if isinstance(getattr(type(config), key, None), property):
        return False
    try:
        return getattr(config, key, None) is not None
    except RuntimeError:  # layers have values of their own
        return True


def model_of(family: str) -> Any:
    """As transformers builds it, in evaluation mode, no parameter left at zero or one, with its cache as it comes."""
    import torch
    import transformers

    has_images = family.endswith(image_families.SUFFIX)
    kind = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind.from_config(config_of(family)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"not tiny by these keys: {size:,} parameters")
    model = kind.from_config(config_of(family)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model.eval()


def batches(family: str) -> list[dict[str, Any]]:
    import torch

    if family.endswith(image_families.SUFFIX):
        return image_families.batches(model_of(family), VOCABULARY)
    made = []
    for number, length in enumerate(LENGTHS):
        drawn = torch.randint(3, VOCABULARY, (4, length + 1), generator=torch.Generator().manual_seed(number))
        labels = drawn[:, 1:].clone()
        labels[0, :3] = -100
        made.append({"tokens": drawn[:, :-1].clone(), "labels": labels})
    return made


def alone(family: str, dtype: str = "float32") -> list[tuple[float, dict[str, Any]]]:
    """The loss and the gradients of each step, in one process, by plain torch."""
    import torch
    import torch.nn.functional as F

    model = model_of(family).to(getattr(torch, dtype))
    found = []
    for batch in batches(family):
        beside = {key: value for key, value in batch.items() if key not in ("tokens", "labels", "images_per_row")}
        logits = model(input_ids=batch["tokens"], use_cache=False, **_in(dtype, beside)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        named = model.named_parameters(remove_duplicate=False)
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
        found.append((loss.item(), gradients))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return found


def _in(dtype: str, batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {k: v.to(getattr(torch, dtype)) if v.is_floating_point() else v for k, v in batch.items()}


def judge(family: str, sizes: dict[str, int], dtype: str = "float32") -> Result:
    """Run by each rank: the largest errors of what it holds, and the names of that."""
    import warnings

    import torch
    from torch.distributed.tensor import DTensor

    from meshwright import Layout, parallelize
    from meshwright.core.errors import MeshwrightError
    from meshwright.distributed.mesh import data_position
    from meshwright.introspection.images import rows_of

    warnings.filterwarnings("ignore")
    expected, plain = alone(family, dtype), model_of(family)
    once = {name for name, _ in plain.named_parameters()}
    names_of: dict[int, set[str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), set()).add(name)
    alike = {name: names for names in names_of.values() for name in names}
    try:
        model = parallelize(model_of(family).to(getattr(torch, dtype)), Layout(**sizes))
    except MeshwrightError as error:
        return {"refused": str(error).splitlines()[0]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, ranks = data_position(model.mesh)
    errors = {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
    worst, names = "", set()
    for batch, (loss, gradients) in zip(batches(family), expected, strict=True):
        rows = len(batch["tokens"]) // ranks
        batch = {
            key: value.to(getattr(torch, dtype)) if value.is_floating_point() else value for key, value in batch.items()
        }
        try:
            found = model.forward_backward(rows_of(batch, rank * rows, (rank + 1) * rows))
        except MeshwrightError as error:
            return {"refused": str(error).splitlines()[0]}
        errors["loss"] = _larger(errors["loss"], abs(float(found) - loss) / abs(loss))
        norm = float(torch.stack([gradients[name].norm() for name in once]).norm())
        for name, parameter in model.named_parameters():
            whole = torch.zeros_like(gradients[name]) if parameter.grad is None else parameter.grad
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            names |= alike[name]
            off = float((whole - gradients[name]).norm()) / max(float(gradients[name].norm()), SMALLEST * norm)
            if not off <= errors["gradient"]:
                errors["gradient"], worst = off, name
        errors["norm"] = _larger(errors["norm"], abs(model.optimizer_step(optimizer).grad_norm - norm) / norm)
    return {"errors": errors, "worst": worst, "names": names, "all": set(expected[0][1])}


def _larger(one: float, other: float) -> float:
    return one if other <= one else other  # NaN stays


def judged(pool: Any, family: str, axis: str, seconds: float) -> Result:
    """One word, why, and how long it took."""
    from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerTimeout

    begun = time.monotonic()
    try:
        result = _verdict(pool.run(judge, family, AXES[axis], timeout=seconds))
        if result["is"] == "differs":  # by rounding, perhaps
            exact = _verdict(pool.run(judge, family, AXES[axis], "float64", timeout=seconds), EXACT, EXACT)
            result = exact | {"why": f"in float64: {exact['why']}; in float32: {result['why']}"}
    except WorkerTimeout:
        result = {"is": "too long", "why": f"more than {seconds:.0f} s"}
    except (WorkerDied, WorkerFailed) as error:
        last = str(error).strip().splitlines()[-1]
        result = {"is": "crash", "why": last}
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def _verdict(found: list[Result], largest_loss: float = LOSS, largest: float = GRADIENT) -> Result:
    refusal = next((one["refused"] for one in found if "refused" in one), None)
    if refusal is not None:
        return {"is": "–" if "has no module of stacked experts" in refusal else "refused", "why": refusal}
    errors = {key: max(one["errors"][key] for one in found) for key in ("loss", "gradient", "norm")}
    absent = sorted(found[0]["all"].difference(*(one["names"] for one in found)))
    fine = errors["loss"] <= largest_loss and max(errors["gradient"], errors["norm"]) <= largest and not absent
    where = max(found, key=lambda one: one["errors"]["gradient"])["worst"]
    said = f"loss {errors['loss']:.1e}, gradient {errors['gradient']:.1e} ({where}), norm {errors['norm']:.1e}"
    return {"is": "equal" if fine else "differs", "why": said + (f", absent: {absent}" if absent else "")}


# --- what is kept, and the page


@functools.cache
def source_hash() -> str:
    """Of the library, this file, and the versions."""
    found = hashlib.sha256(versions().encode())
    for path in [*sorted((ROOT / "src").rglob("*.py")), Path(__file__)]:
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def versions() -> str:
    from importlib.metadata import version

    return f"torch {version('torch')}, transformers {version('transformers')}"


def kept() -> dict[str, Result]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def keep(results: dict[str, Result]) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    beside = KEPT.with_suffix(".new")
    beside.write_text(json.dumps(results, indent=1, ensure_ascii=False))
    beside.replace(KEPT)


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def page(results: dict[str, Result]) -> str:
    """The table, and the reasons below it."""
    days = sorted({result["day"] for result in results.values()})
    with_images = {key: result for key, result in results.items() if image_families.SUFFIX in key}
    return "\n".join(
        [
            "# Families of transformers, each axis by itself",
            "",
            f"`benchmarks/families.py`, {days[0] if days[0] == days[-1] else f'{days[0]} to {days[-1]}'},"
            f" {versions()}, CPU, gloo. Tiny"
            " models with random weights on two ranks, two steps in float32: *equal* means each loss within 1e-5 and"
            " each gradient within"
            " 1e-4 of one plain torch process, or, where rounding in float32 takes further, all of them within 1e-5 in"
            " float64. –: the family has no stacked experts.",
            "",
            *_table({key: result for key, result in results.items() if key not in with_images}, list(AXES)),
            "## With images",
            "",
            "Models of images and text (`AutoModelForImageTextToText`), two steps of four rows: in the first the rows"
            " have two, none, one and no images, in the second none, one, two and none, so that microbatches and ranks"
            " are without any. A model that requires images has one in each row."
            " A family that has no row here, and is not among those left out, was not run.",
            "",
            *_table(with_images, list(image_families.AXES)),
        ]
    )


def _table(results: dict[str, Result], axes: list[str]) -> list[str]:
    """Write a row for each family, and the reasons below."""
    rows, reasons = [], {}
    names = sorted({key.split(" ")[0] for key in results})
    left_out = {
        name: results[f"{name} dp_shard"]["why"]
        for name in names
        if results.get(f"{name} dp_shard", {}).get("is") == "left out"
    }
    counts = {
        axis: Counter(results[f"{n} {axis}"]["is"] for n in names if n not in left_out and f"{n} {axis}" in results)
        for axis in axes
    }
    for name in names:
        if name in left_out:
            continue
        cells = []
        for axis in axes:
            result = results.get(f"{name} {axis}", {"is": ""})
            word = result["is"]
            if word not in ("equal", "–", ""):
                why = result["why"].replace("|", "\\|").replace("<", "&lt;")
                number = reasons.setdefault(why, len(reasons) + 1)
                word = f"{word} [{number}]"
            cells.append(word)
        rows.append(f"| {name.removesuffix(image_families.SUFFIX)} | " + " | ".join(cells) + " |")
    sums = " · ".join(
        f"{axis}: " + ", ".join(f"{n} {word}" for word, n in counts[axis].most_common() if word != "–") for axis in axes
    )
    parts = [f"{name.removesuffix(image_families.SUFFIX)} ({_short(why, 90)})" for name, why in left_out.items()]
    return [
        sums,
        "",
        "| family | " + " | ".join(f"{axis} = 2" for axis in axes) + " |",
        "|---|" + "---|" * len(axes),
        *rows,
        "",
        *(f"{number}. {_short(why)}" for why, number in reasons.items()),
        "",
        *(["Left out: " + "; ".join(parts) + ".", ""] if parts else []),
    ]


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"


def main() -> int:
    from meshwright.distributed.process.workers import PRELOAD, WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, metavar="FAMILY")
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--seconds", type=float, default=120.0, help="given to each family on each axis")
    parser.add_argument(
        "--unknown", action="store_true", help="run only what has no result yet, whatever the sources were then"
    )
    parser.add_argument("--page", action="store_true", help="write the page from what is kept, and run nothing")
    asked = parser.parse_args()
    results = kept()
    if not asked.page:
        with WorkerPool(2, threads=1) as pool:
            pool._context.set_forkserver_preload([PRELOAD, "transformers.models.llama.modeling_llama"])
            for family in asked.only or [*families(), *image_families.families()]:
                axes = image_families.AXES if family.endswith(image_families.SUFFIX) else asked.axes
                todo = [
                    axis
                    for axis in axes
                    if axis in asked.axes and not _is_known(results.get(f"{family} {axis}"), unknown=asked.unknown)
                ]
                stamp = {"source": source_hash(), "day": date.today().isoformat()}
                if todo:
                    try:
                        pool.run(alone, family, world=1, timeout=asked.seconds)
                    except Exception as error:  # noqa: BLE001  (whatever transformers raises)
                        why = str(error).strip().splitlines()[-1]
                        results |= {
                            f"{family} {axis}": {"is": "left out", "why": why, "seconds": 0.0} | stamp for axis in axes
                        }
                        print(f"{family:24} left out: {why[:200]}", flush=True)
                        todo = []
                for axis in todo:
                    result = judged(pool, family, axis, asked.seconds) | stamp
                    results[f"{family} {axis}"] = result
                    print(
                        f"{family:24} {axis:9} {result['is']:8} {result['seconds']:6.1f} s  {result['why'][:400]}",
                        flush=True,
                    )
                keep(results)
    if asked.only is None or asked.page:
        PAGE.write_text(page(results))
    return int(any(result["is"] in ("differs", "crash") for result in results.values()))


def _is_known(result: Result | None, *, unknown: bool) -> bool:
    return result is not None and (unknown or result["source"] == source_hash())


if __name__ == "__main__":
    raise SystemExit(main())
