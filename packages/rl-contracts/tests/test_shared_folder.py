"""Folders that appear at once or not at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rl_contracts.shared_folder import new_folder


@pytest.fixture
def _one_process() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing from the stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("kind", [OSError, KeyError, KeyboardInterrupt])
def test_a_failed_write_leaves_no_folder(tmp_path: Path, kind: type[BaseException]) -> None:
    """What is there under the final name is complete, also after a failure and a new try (A49)."""
    folder = tmp_path / "checkpoint"

    def fail_half_way() -> None:
        with new_folder(folder) as unfinished:
            (unfinished / "half").write_text("half")
            raise kind("disk full")

    with pytest.raises(kind, match="disk full"):
        fail_half_way()
    assert not folder.exists()
    with new_folder(folder) as unfinished:
        (unfinished / "whole").write_text("whole")
        assert not folder.exists()
    assert [file.name for file in folder.iterdir()] == ["whole"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.usefixtures("_one_process")
def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    """Not even an empty one."""
    with (
        pytest.raises(FileExistsError, match="expected a new folder, but it exists; give another"),
        new_folder(tmp_path),
    ):
        pass


def test_one_ranks_failure_is_the_others_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of two cannot write: rank 0 raises an error that says so, and there is no folder."""
    from_rank_1 = iter([None, None, "OSError: disk full"])

    def all_gather_object(texts: list[str | None], text: str | None) -> None:
        texts[:] = [text, next(from_rank_1)]

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    folder = tmp_path / "checkpoint"
    with (
        pytest.raises(RuntimeError, match="rank 1 failed: OSError: disk full"),
        new_folder(folder) as unfinished,
    ):
        (unfinished / "whole").write_text("whole")
    assert not folder.exists()
