"""The data-parallel floor on a GPU. Run where one is seen; elsewhere these files are not collected."""

import pytest
import torch

pytestmark = pytest.mark.gpu

CPU_PROMPT = [1, 2, 3, 4]


def batch_of(rows=4, seq=32, vocab=256):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab, (rows, seq + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def job_steps(techniques, steps=3):
    """Losses and gradient norms of a few steps on the GPU."""
    from meshwright import Layout, parallelize
    from meshwright.models.decoder_config import SIZES

    model = parallelize(SIZES["debug"], Layout(), techniques=techniques, draw_on="cuda")  # as the oracle's are
    assert model.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3, fused=True)
    out = []
    for _ in range(steps):
        loss = model.forward_backward(batch_of())
        result = model.optimizer_step(optimizer, max_norm=1.0)
        out.append((float(loss), result.grad_norm))
    return out, {fact.dtype for fact in model.plan.parameters}, model.plan.data.technique


def job_oracle(steps=3):
    """The same in plain torch on the same GPU, from the same weights."""
    import torch.nn.functional as F

    from meshwright.distributed.weights.constructed import materialise
    from meshwright.models.decoder import Decoder
    from meshwright.models.decoder_config import SIZES

    with torch.device("meta"):
        model = Decoder(SIZES["debug"])
    materialise(model, torch.device("cuda"), 0, {})
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, fused=True
    )
    out = []
    for _ in range(steps):
        batch = {key: value.cuda() for key, value in batch_of().items()}
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.item(), norm.item()))
    return out


RECOMPUTED = [{"activation_checkpointing": mode} for mode in ("full", "every_n", "selective_op", "offload")]


@pytest.mark.parametrize("extra", [{}, *RECOMPUTED], ids=str)
def test_fp32_on_one_gpu_equals_plain_torch(spmd, extra):
    found, dtypes, technique = spmd(1, job_steps, {"precision": {"compute": "float32"}, **extra})[0]
    expected = spmd(1, job_oracle)[0]
    assert technique == "none" and dtypes == {"float32"}
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5) and norm == pytest.approx(wanted_norm, rel=1e-4)


@pytest.mark.parametrize("extra", [{}, {"cpu_offload": True}, {"activation_checkpointing": "full"}, {"compile": True}])
def test_bf16_stays_near_fp32(spmd, extra):
    found, dtypes, technique = spmd(1, job_steps, {"precision": {"compute": "bfloat16"}, **extra}, timeout=300.0)[0]
    expected = spmd(1, job_oracle)[0]
    assert technique == "fully_shard" and dtypes == {"float32"}
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-2) and norm == pytest.approx(wanted_norm, rel=5e-2)


def job_async_tensor(asynchronous):
    """Loss and gradient norm of two steps on two GPUs that share out the weights."""
    from meshwright import Layout, parallelize
    from meshwright.models.decoder_config import SIZES

    techniques = {"async_tensor_parallel": asynchronous, "precision": {"compute": "float32"}}
    model = parallelize(SIZES["debug"], Layout(tp=2), techniques=techniques)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [(float(model.forward_backward(batch_of())), model.optimizer_step(optimizer).grad_norm) for _ in range(2)]


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="asynchronous tensor parallelism needs two GPUs joined by NVLink"
)
def test_asynchronous_tensor_parallelism_gives_the_numbers_of_the_plain_form(spmd):
    found, expected = spmd(2, job_async_tensor, True)[0], spmd(2, job_async_tensor, False)[0]
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5) and norm == pytest.approx(wanted_norm, rel=1e-4)


def job_checkpoint(path):
    from meshwright import Layout, load, parallelize, save
    from meshwright.models.decoder_config import SIZES

    results = []
    for seed in (0, 7):
        model = parallelize(SIZES["debug"], Layout(), seed=seed)
        optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3, fused=True)
        if seed == 0:
            model.forward_backward(batch_of())
            model.optimizer_step(optimizer, max_norm=1.0)
            save(model, path, optimizer=optimizer)
        else:
            load(model, path, optimizer=optimizer)
        results.append((float(model.forward_backward(batch_of())), model.generate(CPU_PROMPT, 8, temperature=0)))
    return results


def test_a_checkpoint_comes_back_bitwise(spmd, tmp_path):
    saved, loaded = spmd(1, job_checkpoint, str(tmp_path / "step"))[0]
    assert saved == loaded


def job_trace(folder, compute):
    """A trace written on this machine, and a run that is compared with it.

    On the GPU, from weights drawn on the CPU.
    """
    import json
    from pathlib import Path

    from meshwright.training.config import Config
    from meshwright.training.trainer import Trainer
    from meshwright.training.views.telling import build_progress
    from meshwright.verification.of_config import write_trace

    path = Path(folder) / f"{compute}.trace"
    text = Path(folder) / "text.txt"
    text.write_text("".join(f"line {i} of a text that nobody reads, {i * i}\n" for i in range(2000)))
    settings = {
        "run": str(path.with_suffix(".run")),
        "steps": 4,
        "model": {"size": "debug"},
        "data": {"source": [str(text)], "seq_len": 32, "cache": str(Path(folder) / "cache")},
        "batch": {"global_batch": 8},
        "techniques": {"precision": {"compute": compute}},
        "validation": {"every": 0},
        "sample": {"tokens": 0},
    }
    with build_progress(is_main=False) as progress:
        write_trace(Config.from_dict(settings), path, 3, progress)
    status = Trainer(Config.from_dict(settings | {"check_trace": str(path)})).run()
    return status, json.loads((path.with_suffix(".run") / "trace_check.json").read_text())["equal"]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_run_on_a_gpu_is_equal_to_its_trace(spmd, tmp_path, compute):
    assert spmd(1, job_trace, str(tmp_path), compute)[0] == (0, True)


def test_the_history_of_memory_is_written(tmp_path):
    from meshwright.core import torch_private as private

    private.record_memory_history(1000)
    torch.ones(4, device="cuda")
    private.dump_memory_history(str(tmp_path / "history.pickle"))
    private.record_memory_history(None)
    assert (tmp_path / "history.pickle").stat().st_size > 0


@pytest.mark.parametrize(("name", "dtype"), [("cuda flash", torch.bfloat16), ("cuda efficient", torch.float32)])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_a_fused_kernel_gives_what_blocks_do(name, dtype, key_heads):
    from meshwright.distributed.context.kernels import KeysAtHand, Scores, attention, fused_kernel
    from meshwright.introspection.mixing.masks import KeyRanges

    def attended(given, reach):
        output, logarithm = attention(*given, KeysAtHand(reach), Scores(0.125))
        weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
        (output * weights).sum().backward()
        return output.detach(), logarithm.detach(), *(x.grad for x in given)

    generator = torch.Generator("cuda").manual_seed(0)
    exact = [torch.randn(2, n, 320, 64, generator=generator, device="cuda").double() for n in (4, key_heads, key_heads)]
    place = torch.arange(320, device="cuda")[None]
    reach = KeyRanges(torch.zeros_like(place), torch.where(place < 200, place + 1, 320))  # triangle, rectangle
    narrow = [x.to(dtype).requires_grad_() for x in exact]
    assert (kernel := fused_kernel(narrow[0], narrow[2], has_cap=False, has_sinks=False)) is not None
    assert kernel.kernel.name == name
    bound = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    for mine, other in zip(attended(narrow, reach), attended([x.requires_grad_() for x in exact], reach), strict=True):
        assert float((mine.double() - other).norm() / other.norm()) < bound
