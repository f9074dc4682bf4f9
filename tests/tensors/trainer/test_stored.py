"""Slices of tensors that files store in another form, compared with transformers' result of the whole files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.modeling import tensor_names
from rlrun.trainer.modeling.stored.load_plan import plan_tensors
from rlrun.trainer.modeling.stored.stored_tensors import (
    Lazy,
    chunk_tensor,
    join_tensors,
    stack_tensors,
    transpose_tensor,
)
from rlrun.trainer.modeling.stored.weight_files import Files

WIDTH, INNER = 8, 12
MLP = "model.layers.0.mlp"


def lazy(tensor: Tensor) -> Lazy:
    return Lazy(tuple(tensor.shape), lambda slices: tensor[slices])


def parts_of(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    bounds = [[slice(a, b) for a in range(size + 1) for b in range(a, size + 1)] for size in shape]
    yield from itertools.product(*bounds)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda a, b: stack_tensors([lazy(a), lazy(b)], 0), lambda a, b: torch.stack([a, b])),
        (lambda a, b: stack_tensors([lazy(a), lazy(b)], 1), lambda a, b: torch.stack([a, b], 1)),
        (lambda a, b: join_tensors([lazy(a), lazy(b)], 0), lambda a, b: torch.cat([a, b])),
        (lambda a, b: join_tensors([lazy(a), lazy(b)], 1), lambda a, b: torch.cat([a, b], 1)),
        (lambda a, b: chunk_tensor(lazy(a), 2, 0)[1], lambda a, b: a.chunk(2)[1]),
        (lambda a, b: chunk_tensor(lazy(a), 3, 1)[2], lambda a, b: a.chunk(3, 1)[2]),
        (lambda a, b: transpose_tensor(lazy(a), 0, 1), lambda a, b: a.T),
    ],
)
def test_lazy_slices_equal_the_whole_tensor(make: Callable[..., Lazy], expected: Callable[..., Tensor]) -> None:
    a, b = torch.arange(15.0).view(3, 5), torch.arange(15.0, 30.0).view(3, 5)
    found, whole = make(a, b), expected(a, b)
    assert found.shape == tuple(whole.shape)
    assert torch.equal(found.read_all(), whole)
    for slices in parts_of(found.shape):
        if all(one.start < one.stop for one in slices):  # empty parts are never read
            assert torch.equal(found.read(slices), whole[slices]), slices


@pytest.fixture
def model() -> Any:
    shape = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": 20}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))


def planned(
    model: Any, conversions: list[Any], tensors: dict[str, Tensor], folder: Path
) -> tuple[dict[str, Lazy], Files]:
    setattr(model, tensor_names._ATTRIBUTE, conversions)
    file = folder / "model.safetensors"
    save_file(tensors, file)
    files = Files(dict.fromkeys(tensors, file))
    return plan_tensors(model, files), files


def test_fused_matrices_are_read_by_halves(model: Any, tmp_path: Path) -> None:
    fused = torch.randn(2 * INNER, WIDTH)
    conversion = WeightConverter("mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    found, files = planned(model, [conversion], {f"{MLP}.both.weight": fused}, tmp_path)
    slices = (slice(2, 5), slice(0, WIDTH))
    assert torch.equal(found[f"{MLP}.up_proj.weight"].read(slices), fused[INNER:][slices])
    assert torch.equal(found[f"{MLP}.gate_proj.weight"].read_all(), fused[:INNER])
    assert files.largest_read == fused.nbytes // 2
    assert files.bytes_read == 3 * WIDTH * 4 + fused.nbytes // 2


def test_renamed_pieces_of_several_files_are_joined(model: Any, tmp_path: Path) -> None:
    pieces = {f"old.layers.0.mlp.piece_{at}.weight": torch.randn(INNER // 3, WIDTH) for at in range(3)}
    conversions = [
        WeightRenaming(r"^old\.", "model."),
        WeightConverter("mlp.piece_*.weight", "mlp.up_proj.weight", [Concatenate(dim=0)]),
    ]
    found, files = planned(model, conversions, pieces, tmp_path)
    whole = torch.cat([*pieces.values()])
    assert torch.equal(found[f"{MLP}.up_proj.weight"].read((slice(3, 9), slice(1, 4))), whole[3:9, 1:4])
    assert files.bytes_read == 6 * 3 * 4


@pytest.mark.parametrize("turned", [True, False])
def test_matrix_is_transposed_according_to_its_shape(model: Any, tmp_path: Path, turned: bool) -> None:
    own = torch.randn(WIDTH, INNER)
    conversion = WeightConverter("down_proj.weight", "down_proj.weight", [Transpose(0, 1, check_dims=True)])
    stored = own.T.contiguous() if turned else own
    found, files = planned(model, [conversion], {f"{MLP}.down_proj.weight": stored}, tmp_path)
    slices = (slice(1, 3), slice(4, 9))
    assert torch.equal(found[f"{MLP}.down_proj.weight"].read(slices), own[slices])
    assert files.bytes_read == 2 * 5 * 4


def test_unknown_conversion_is_done_by_transformers(model: Any, tmp_path: Path) -> None:
    stored = torch.randn(2 * INNER, WIDTH)
    conversion = WeightConverter(
        "mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Interleave(dim=0), Chunk(dim=0)]
    )
    found, files = planned(model, [conversion], {f"{MLP}.both.weight": stored}, tmp_path)
    slices = (slice(1, 3), slice(0, WIDTH))
    assert torch.equal(found[f"{MLP}.gate_proj.weight"].read(slices), stored[::2][slices])
    assert torch.equal(found[f"{MLP}.up_proj.weight"].read(slices), stored[1::2][slices])
    assert files.largest_read == stored.nbytes


def test_incompatible_pieces_are_refused(model: Any, tmp_path: Path) -> None:
    pieces = {f"{MLP}.piece_{at}.weight": torch.randn(4, WIDTH + at) for at in range(3)}
    conversion = WeightConverter("mlp.piece_*.weight", "mlp.up_proj.weight", [MergeModulelist(dim=0)])
    with pytest.raises(ValueError, match=r"tensors of shapes \[4, 8\] and \[4, 9\]"):
        planned(model, [conversion], pieces, tmp_path)
    fewer = {f"{MLP}.piece_{at}.weight": torch.randn(4, WIDTH) for at in range(2)}
    conversion = WeightConverter("mlp.piece_*.weight", "mlp.up_proj.weight", [Concatenate(dim=0)])
    with pytest.raises(RoleError, match=r"up_proj\.weight has shape \[8, 8\], but \[12, 8\] by config\.json"):
        planned(model, [conversion], fewer, tmp_path)
