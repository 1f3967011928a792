"""The decoder as its callers see it: causal, packed, cached, in fp32 and bf16."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from argosy.config.attention import MLAConfig
from argosy.config.model import ModelConfig, MoEConfig
from argosy.models.attention import Attention, Documents, LayerCache
from argosy.models.decoder import Decoder, attention_of, cache_of, feed_forward_of
from argosy.models.experts import MoE, moe_layers
from argosy.models.initialize import materialize
from argosy.models.layers import FeedForward
from argosy.models.loss import chunk_loss_and_gradient
from argosy.models.mla import LatentAttention
from argosy.plan.parameters import Stage


def tokens(rows: int = 2, seq_len: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(101, (rows, seq_len), generator=torch.Generator().manual_seed(seed))


def test_it_is_built_without_memory(small):
    assert all(p.is_meta for p in Decoder(small).parameters())


def test_the_config_says_which_attention_and_cache_a_block_has(small):
    latent = ModelConfig(mla=MLAConfig(kv_rank=16))
    assert type(attention_of(small)) is Attention and type(attention_of(latent)) is LatentAttention
    assert type(cache_of(small, 0, 4)) is LayerCache


def test_the_config_says_which_layers_have_experts(small):
    config = ModelConfig(moe=MoEConfig(experts=4, first_dense_layers=1))
    assert [type(feed_forward_of(config, i)) for i in range(3)] == [FeedForward, MoE, MoE]
    assert type(feed_forward_of(small, 3)) is FeedForward
    both = torch.nn.Sequential(feed_forward_of(config, 1), feed_forward_of(config, 0))
    assert list(moe_layers(both)) == [both[0]]


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


def test_scores_of_a_reward_model_are_neither_scaled_nor_capped(small, build):
    """As in transformers' classes, and in the loss that trains them."""
    plain = small.model_copy(update={"score": True})
    other = plain.model_copy(update={"logit_scale": 0.25, "logit_softcap": 0.01})
    assert torch.equal(build(other)(tokens()), build(plain)(tokens()))


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
    documents = Documents.of(torch.cat([torch.arange(length) for length in lengths])[None])
    packed = model(tokens_BT, documents=documents)
    start = 0
    for length in lengths:
        alone = model(tokens_BT[:, start : start + length])
        torch.testing.assert_close(packed[:, start : start + length], alone, rtol=1e-4, atol=1e-4)
        start += length


def test_documents_follow_from_positions(small, build):
    model, tokens_BT = build(small), tokens()
    positions_BT = torch.cat([torch.arange(n) for n in (5, 19, 1, 22, 1)]).view(2, 24)
    documents = Documents.of(positions_BT)
    assert documents.starts.tolist() == [0, 5, 24, 25, 47, 48] and documents.starts.dtype == torch.int32
    from_positions = model(tokens_BT, positions_BT=positions_BT)
    assert torch.equal(from_positions, model(tokens_BT, positions_BT=positions_BT, documents=documents))
    torch.testing.assert_close(from_positions, model(tokens_BT, documents=documents), rtol=1e-4, atol=1e-4)
    assert (from_positions - model(tokens_BT)).abs().max() > 0.01


def test_positions_say_how_far_tokens_are_apart(small, build):
    model, tokens_BT = build(small), tokens(rows=1)
    documents, places = Documents.of(torch.arange(24)[None]), torch.arange(24)[None]
    near, far = (model(tokens_BT, positions_BT=positions, documents=documents) for positions in (places // 2, places))
    assert torch.equal(near[:, :1], far[:, :1])
    assert (near - far).abs().max() > 0.01


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (1, 2), (0, 3)], ids=str)
def test_stages_one_after_the_other_are_the_whole(cuts, tied, small, build):
    """Loss, logits and every gradient; a tied embedding's is the sum over the two stages that hold it."""
    config = small.model_copy(update={"layers": 3, "tie_embeddings": tied})
    model, tokens_BT, targets_BT = build(config), tokens(), tokens(seed=2)
    edges = [0, *cuts, 3]
    stages = [
        Decoder(config, stage=Stage(range(begin, end), first=i == 0, last=i == len(cuts)))
        for i, (begin, end) in enumerate(itertools.pairwise(edges))
    ]
    for stage in stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({name: model.get_parameter(name) for name in stage.state_dict()})

    def run(targets: torch.Tensor | None) -> torch.Tensor:
        x = tokens_BT
        for stage in stages:
            x = stage(x, targets)
        return x

    assert torch.equal(run(None), model(tokens_BT))
    loss, expected = run(targets_BT), model(tokens_BT, targets_BT)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in itertools.chain(*(stage.named_parameters() for stage in stages)):
        found[name] = found.get(name, 0) + parameter.grad
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()}, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_the_names_and_the_initial_weights_that_the_whole_has_there(tied, small, build):
    config = small.model_copy(update={"layers": 3, "tie_embeddings": tied})
    whole = Decoder(config)
    materialize(whole, config, torch.device("cpu"), 5)
    ends = {"embedding.weight"}, {"norm.weight", "embedding.weight" if tied else "head.weight"}
    for stage, outside in ((Stage(range(2), last=False), ends[0]), (Stage(range(2, 3), first=False), ends[1])):
        model = Decoder(config, stage=stage)
        materialize(model, config, torch.device("cpu"), 5)
        names = {name for name, parameter in model.named_parameters()}
        assert {name for name in names if not name.startswith("blocks.")} == outside
        assert {int(name.split(".")[1]) for name in names - outside} == set(stage.layers)
        assert all(torch.equal(model.get_parameter(name), whole.get_parameter(name)) for name in names)


def test_the_loss_of_a_chunk_may_be_another(small, build):
    model = build(small)
    expected = model(tokens(), tokens(seed=2))
    model.loss_of_chunk = lambda logits, targets: tuple(3 * x for x in chunk_loss_and_gradient(logits, targets))
    torch.testing.assert_close(model(tokens(), tokens(seed=2)), 3 * expected)


@pytest.mark.parametrize("pieces", [(24,), (1,) * 24, (7, 1, 16)], ids=str)
def test_reading_with_a_cache_gives_the_logits_of_reading_at_once(pieces, small, build):
    model, tokens_BT = build(small), tokens()
    cache = model.new_cache(max_seq_len=24)
    with torch.no_grad():
        parts = [model(piece, cache=cache) for piece in tokens_BT.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens_BT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [{}, {"rotary_layers": [True, False], "temperature": 0.1}], ids=["", "llama4"])
def test_bf16_stays_close_to_fp32_and_leaves_the_gradients_in_fp32(small, build, attention):
    config = ModelConfig(**small.model_dump() | {"attention": attention})
    exact, rounded = build(config), build(config, compute_dtype=torch.bfloat16)
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
