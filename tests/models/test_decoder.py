"""The decoder as its callers see it: causal, packed, cached, in fp32 and bf16."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from argosy.models.decoder import Decoder


def tokens(rows: int = 2, seq_len: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(101, (rows, seq_len), generator=torch.Generator().manual_seed(seed))


def test_it_is_built_without_memory(small):
    assert all(p.is_meta for p in Decoder(small).parameters())


def test_loss_is_cross_entropy_of_the_logits(small, build):
    model, tokens_BT = build(small), tokens()
    targets_BT = tokens_BT.roll(-1, dims=1)
    targets_BT[:, -1] = -100
    logits_BTV = model(tokens_BT)
    expected = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
    loss = model(tokens_BT, targets_BT)
    torch.testing.assert_close(loss, expected)
    gradients, expected_gradients = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_gets_a_gradient(tied, small, build):
    model = build(small.model_copy(update={"tie_embeddings": tied, "attention_bias": True}))
    model(tokens(), tokens(seed=2)).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_tied_embeddings_are_one_weight_after_it_got_memory(small, build):
    config = small.model_copy(update={"tie_embeddings": True})
    model = build(config)
    names = dict(model.named_parameters())
    assert "head.weight" not in names and "head.weight" not in model.state_dict()
    untied = build(small)
    untied.load_state_dict(model.state_dict() | {"head.weight": model.embedding.weight})
    torch.testing.assert_close(model(tokens()), untied(tokens()))


def test_the_future_does_not_reach_back(small, build):
    model, tokens_BT = build(small), tokens()
    changed_BT = tokens_BT.clone()
    changed_BT[:, 10:] = 5
    torch.testing.assert_close(model(changed_BT)[:, :10], model(tokens_BT)[:, :10])
    assert (model(changed_BT)[:, 10:] - model(tokens_BT)[:, 10:]).abs().max() > 0.01


@pytest.mark.parametrize("lengths", [(12, 12), (5, 19), (1, 22, 1)], ids=str)
def test_a_document_does_not_reach_the_next(lengths, small, build):
    """Each document's logits are those it has alone: positions run on, but rotation is relative."""
    model, tokens_BT = build(small), tokens(rows=1)
    documents = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = model(tokens_BT, documents=documents)
    start = 0
    for length in lengths:
        alone = model(tokens_BT[:, start : start + length])
        torch.testing.assert_close(packed[:, start : start + length], alone, rtol=1e-4, atol=1e-4)
        start += length


@pytest.mark.parametrize("pieces", [(24,), (1,) * 24, (7, 1, 16)], ids=str)
def test_reading_with_a_cache_gives_the_logits_of_reading_at_once(pieces, small, build):
    model, tokens_BT = build(small), tokens()
    cache = model.new_cache(batch=2, max_seq_len=24)
    with torch.no_grad():
        parts = [model(piece, cache=cache) for piece in tokens_BT.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens_BT), rtol=1e-4, atol=1e-4)


def test_bf16_stays_close_to_fp32_and_leaves_the_gradients_in_fp32(small, build):
    exact, rounded = build(small), build(small, compute_dtype=torch.bfloat16)
    losses = [model(tokens(), tokens(seed=2)) for model in (exact, rounded)]
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=0)
    losses[1].backward()
    assert all(p.grad.dtype == torch.float32 for p in rounded.parameters())


def test_training_goes_on_after_an_evaluation_in_inference_mode(small, build):
    model = build(small)
    with torch.inference_mode():
        model(tokens())
    model(tokens(), tokens(seed=2)).backward()


def test_reading_a_longer_sequence_later_is_the_same_as_at_once(small, build):
    model, fresh = build(small), build(small)
    model(tokens(seq_len=3))
    assert torch.equal(model(tokens(seq_len=50)), fresh(tokens(seq_len=50)))
