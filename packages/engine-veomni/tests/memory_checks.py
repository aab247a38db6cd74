"""Scenarios of memory: lent, kept on the host, and of exports; see `engine_process.py`."""

from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rank_checks import (
    ATOL,
    DEVICE,
    assert_bit_equal,
    assert_near,
    check_against_reference,
    exported,
    make_engine,
    raised,
)
from safetensors.torch import load_file
from scenario_data import batches_of, loss_fn
from torch import Tensor

from engine_veomni import VeomniEngine, VeomniScorer
from engine_veomni.export import local_shard
from parallel_state.parking import held_by


def check_host_memory(folder: Path, *, ep: int) -> None:
    """Training with trips to the host is training without, bit for bit; meanwhile all is refused.

    On a CPU `to_host` refuses the trip itself, which would free nothing.
    """
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    awake, slept = (make_engine(folder / "model", ep=ep, router_replay="logprobs") for _ in "ab")
    text = raised(ValueError, slept.to_host)
    assert text.startswith("VeomniEngine.to_host: the weights are kept in host memory in any"), text
    text = raised(RuntimeError, slept.to_device)
    assert text.startswith("VeomniEngine.to_device: the weights are on the device; to_host"), text
    with mock.patch("engine_veomni.engine.require_parkable"):
        for _ in range(2):
            for engine in (awake, slept):
                engine.logprobs(batches)
                if engine is slept:  # the routes of `logprobs` are away too, and come back
                    engine.to_host()
                    check_away(engine, folder)
                    engine.to_device()
                engine.forward_backward(batches, loss_fn)
                if engine is slept:
                    text = raised(RuntimeError, engine.to_host)
                    assert "a gradient that no step was taken along; call optim_step" in text, text
                engine.optim_step()
            slept.to_host()
            check_away(slept, folder)
            slept.to_device()
            assert_bit_equal(exported(slept), exported(awake))
    for name, tensor in checkpoint_tensors(awake, folder / f"awake-{ep}").items():
        assert torch.equal(tensor, checkpoint_tensors(slept, folder / f"slept-{ep}")[name]), name
    scorer = VeomniScorer(awake.config, device=DEVICE)
    before = scorer.logprobs(batches)
    assert "VeomniScorer.to_host: the weights are kept" in raised(ValueError, scorer.to_host)
    scorer._park()
    text = raised(RuntimeError, lambda: scorer.logprobs(batches))
    assert text == "VeomniScorer.logprobs: the weights are in host memory; call to_device first"
    scorer.to_device()
    assert all(map(torch.equal, scorer.logprobs(batches), before))


def check_away(engine: VeomniEngine, folder: Path) -> None:
    """No weight, moment or route has memory, and whatever needs them says what to do."""
    router = engine._router
    assert router is not None
    held = [*held_by(engine._policy.model, engine._optimizers), *router.held]
    num_moments = 2 if engine.policy_version else 0
    num_weights = len(list(engine._policy.model.parameters()))
    assert len(held) == num_weights * (1 + num_moments) + len(router.held)
    for tensor in held:
        local = tensor.detach() if tensor.dtype == torch.int16 else local_shard(tensor.detach())
        assert local.untyped_storage().nbytes() == 0
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    for method, call in (
        ("logprobs", lambda: engine.logprobs(batches)),
        ("forward_backward", lambda: engine.forward_backward(batches, loss_fn)),
        ("optim_step", engine.optim_step),
        ("export_weights", engine.export_weights),
        ("export_weights", lambda: engine.save_pretrained(folder / "nowhere")),
        ("save_checkpoint", lambda: engine.save_checkpoint(folder / "nowhere")),
        ("load_checkpoint", lambda: engine.load_checkpoint(folder / "nowhere")),
    ):
        text = raised(RuntimeError, call)
        expected = f"VeomniEngine.{method}: the weights are in host memory; call to_device first"
        assert text == expected, text
    assert not (folder / "nowhere").exists()


def checkpoint_tensors(engine: VeomniEngine, folder: Path) -> dict[str, Tensor]:
    if not folder.exists():
        engine.save_checkpoint(folder)
    return load_file(folder / f"rank-{dist.get_rank():05d}.safetensors")


def check_offload(folder: Path) -> None:
    """Parameters that are kept on the host train as others do, as far as a CPU can tell.

    Here the setting is refused, since they are on the host in any case; built all the same, VeOmni
    takes it, and says so.
    """
    text = raised(ValueError, lambda: make_engine(folder / "model", ep=2, offload="parameters"))
    assert "offload = 'parameters' has no effect on a CPU device; weights and" in text, text
    with mock.patch("engine_veomni.sharded_policy.check_offload"):
        engine = make_engine(folder / "model", ep=2, offload="parameters")
    assert vars(engine._policy.model)["_fsdp_cpu_offload_enabled"] is True
    check_against_reference(engine, folder)


def check_device_memory(folder: Path) -> None:
    """On a GPU: memory really goes, and kept on the host weights train to the same numbers."""
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    awake, slept = (make_engine(folder / "model", ep=1) for _ in "ab")
    for engine in (awake, slept):
        engine.forward_backward(batches, loss_fn)
        engine.optim_step()
    before = torch.cuda.memory_allocated()
    slept.to_host()
    weights = sum(parameter.numel() for parameter in slept._policy.model.parameters())
    assert before - torch.cuda.memory_allocated() >= 12 * weights // dist.get_world_size()
    text = raised(RuntimeError, lambda: slept.logprobs(batches))
    assert text == "VeomniEngine.logprobs: the weights are in host memory; call to_device first"
    slept.to_device()
    for engine in (awake, slept):
        engine.forward_backward(batches, loss_fn)
        engine.optim_step()
    assert_near(exported(slept), exported(awake), atol=ATOL / 10)
    offloaded = make_engine(folder / "model", ep=1, offload="parameters")
    assert all(each.device.type == "cpu" for each in offloaded._policy.model.parameters())
    check_against_reference(offloaded, folder)
    assert "since offload = 'parameters'" in raised(ValueError, offloaded.to_host)


def check_export_copies_no_expert(engine: VeomniEngine) -> None:
    """The experts of a layer are views of the stack that was gathered, in one place each."""
    places: dict[int, list[tuple[int, int]]] = {}
    exports = [weight for weight in engine.export_weights() if ".experts." in weight.name]
    for _, tensor in exports:
        assert tensor.is_contiguous()
        storage = tensor.untyped_storage()
        start = tensor.data_ptr() - storage.data_ptr()
        places.setdefault(storage.data_ptr(), []).append((start, start + tensor.nbytes))
    # two stacks in each of two layers: 8 experts with gate and up, and 8 with down
    assert sorted(map(len, places.values())) == [8, 8, 16, 16]
    for held in places.values():
        ordered = sorted(held)
        assert ordered[0][0] == 0
        assert all(end == start for (_, end), (start, _) in pairwise(ordered))
