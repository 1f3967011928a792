"""The Hugging Face classes that are known, by their model types."""

from __future__ import annotations

from argosy.errors import UserError
from argosy.models.hf_dense import DENSE_FAMILIES
from argosy.models.hf_family import Family
from argosy.models.hf_mixtures import MIXTURES
from argosy.models.hf_uneven import LINEAR_FAMILIES, UNEVEN_FAMILIES
from argosy.models.user_code import declared_family

FAMILY_OF = DENSE_FAMILIES | MIXTURES | LINEAR_FAMILIES | UNEVEN_FAMILIES
"""`ModelConfig.family`, which is also the `model_type` of config.json -> the class."""


def family_of(name: str) -> Family:
    """Return the class of a family, also of the user's. Raises: UserError if it names none, or is not known here."""
    if name in FAMILY_OF:
        return FAMILY_OF[name]
    facts = declared_family(name).facts
    if not facts["architecture"]:
        raise UserError(
            f"model.family = {name!r} names no class of transformers, so there is nothing to export it as. Add "
            "architecture and hidden_act to its @extend.family."
        )
    return Family(facts["architecture"], fixed={"ffn_gate": facts["gated"]}, hidden_act=facts["hidden_act"])
