"""A metric: a number of each rank, and its mean over ranks in metrics.jsonl."""

from argosy import extend


@extend.metric("embedding_rows_used")
def embedding_rows_used(run: extend.Run) -> float:
    """Return the share of the embedding's rows that got a gradient: tokens that the step saw."""
    gradient = run.gradients().get("embedding.weight")
    if gradient is None or not gradient.numel():
        return float("nan")  # another rank has it
    return (gradient.abs().sum(dim=-1) > 0).float().mean().item()
