"""Turn the requested run into the run that is trained: data prepared, sizes filled in, limits checked."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from pydantic import ValidationError

from argosy.checkpoint import store
from argosy.config.data import PrepareConfig, by_option, row_kind
from argosy.config.launch import host_and_port
from argosy.config.optimizer import check_patterns
from argosy.config.schema import RunConfig
from argosy.config.train import check_targets
from argosy.data.crew import PrepareProgress
from argosy.data.loader import OpenData, open_data
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.data.manifest import TOKENIZER, Manifest
from argosy.data.prepare import prepare
from argosy.data.stores.cache import Cache
from argosy.data.stores.folder import StoreFolder
from argosy.data.stores.model_folder import is_model_folder
from argosy.data.stores.store import check_remote, is_url, spelled, upload
from argosy.data.tokenizer import Tokenizer, how_to_prepare, tokenizer_of, usage_of
from argosy.errors import DataError, RunFailed, UserError, first_error
from argosy.files import atomic_write, expanded, make_folder
from argosy.observe.screen import Progress
from argosy.observe.terminal import printable
from argosy.plan.hardware.devices import GIB, is_path
from argosy.plan.hardware.local_machine import cluster_of, host_memory_bytes, process_memory_bytes
from argosy.plan.parameters import linear_names, run_table
from argosy.plan.plan import Plan
from argosy.plan.search.auto import Devices, costs_of, machine_for
from argosy.plan.search.search import least_memory_bytes, nearest_that_fits, search_to_run, with_memory
from argosy.plan.search.space import pins_of


def resolve(run: RunConfig, progress: Progress) -> tuple[RunConfig, OpenData]:
    """Prepare the data and fill in the sizes; return the complete run and its open data. Raises: UserError."""
    cluster_of(run)  # refuse a wrong launch.cluster before anything takes time
    if is_path(run.launch.cluster):
        path = expanded(run.launch.cluster).absolute()
        run = run.with_keys(launch={"cluster": str(path)})
    if run.model.score and run.train.objective != "reward":
        raise UserError(
            f'model.score = true: a reward model ends with a score, and train.objective = "{run.train.objective}" '
            'learns words. Set score = false, or objective = "reward".'
        )
    theirs = None if run.model.weights is None else tokenizer_of(run.model.weights)
    run = _with_what_to_prepare(run, theirs)
    check_parameters(run)
    weights = _start_of(run)
    run = _with_data(run, progress)
    data = open_data(run.data, run.seed, run.train.batches)
    _check_objective(run, data)
    first = data.sources[0]
    _check_tokenizer(run, theirs, first.manifest.tokenizer_sha256, f"{first.name} was prepared with another tokenizer")
    if not run.model.vocab_size:
        run = run.with_keys(model={"vocab_size": data.vocab_size})
    if run.model.vocab_size < (least := data.least_vocab_size):
        raise UserError(
            f"model.vocab_size = {run.model.vocab_size} is smaller than the tokenizer's {least} tokens. "
            "Try model.vocab_size = 0, which takes the tokenizer's."
        )
    prompt, most = run.evaluate.sample_prompt, run.model.max_seq_len
    if prompt and (length := len(data.tokenizer.encode_prompt(prompt))) >= most:
        raise UserError(
            f"evaluate.sample_prompt: it has {length} tokens and model.max_seq_len is {most}, which leaves no room for "
            "the text that goes on from it. Shorten it."
        )
    run = run.with_keys(model={"weights": weights})
    return _with_length(run, data), data


def _with_length(run: RunConfig, data: OpenData) -> RunConfig:
    """Return a run in epochs with its number of steps: the fewest that read so many passes over its source.

    Raises: UserError if several sources are mixed, each of which is passed in a time of its own, or the run's steps
    are others.
    """
    epochs, batch = run.train.epochs, run.train.global_batch
    if not epochs:
        return run
    if len(data.sources) > 1:
        raise UserError(
            f"train.epochs = {epochs:g} with {len(data.sources)} data sources: their weights say how often each is "
            "read, and no pass ends for all at once. Give train.steps."
        )
    samples = data.sources[0].windows(run.data.seq_len)
    steps = max(1, math.ceil(Fraction(str(epochs)) * samples / batch))  # 1.1 as it is written
    if run.train.steps not in (0, steps):
        raise UserError(
            f"train.steps = {run.train.steps} and train.epochs = {epochs:g}, which are {steps} steps of {batch} of the "
            f"{samples} sequences. Set one of them to 0."
        )
    return run.with_keys(train={"steps": steps})


def with_known_sizes(run: RunConfig) -> RunConfig:
    """Return the run with the vocabulary that its data have, or will have once they are prepared; nothing is prepared.

    If neither is known, it stays 0. Raises: UserError for prepared data or a tokenizer that cannot be read, or a
    pattern of parameters that matches none.
    """
    check_parameters(run)
    if run.model.vocab_size:
        return run
    first = next(iter(run.data.sources), str(run.data.prepare.out))
    folder = Path(first)
    given = run.data.prepare.tokenizer
    vocab_size = 0
    if is_url(first):
        vocab_size = StoreFolder(first, Cache(run.data.cache)).manifest.vocab_size
    elif (folder / MANIFEST).exists():
        vocab_size = Manifest.load(folder, check_shards=False).vocab_size
    elif run.data.prepare.input:
        vocab_size = Tokenizer.load(given).vocab_size if given else run.data.prepare.vocab_size
    return run.with_keys(model={"vocab_size": vocab_size})


def with_known_length(run: RunConfig) -> RunConfig:
    """Return a run in epochs with its number of steps, and with the tokens that its evaluations read, if its data are
    prepared and on this machine.

    Raises: UserError, as for a run that trains; DataError if a shard is missing or cut off.
    """
    folders = [Path(source) for source in run.data.sources or (str(run.data.prepare.out),)]
    if not all((folder / MANIFEST).exists() for folder in folders):
        return run
    manifests = [Manifest.load(folder, check_shards=False) for folder in folders]
    sizes = [sum(shard.tokens for shard in each.splits.get("validation", ())) for each in manifests]
    share = run.evaluate.tokens // max(1, sum(size > 0 for size in sizes))
    run = run.with_keys(evaluate={"tokens": max(1, sum(min(share, size) for size in sizes))})
    if run.train.steps or not run.train.epochs:
        return run
    return _with_length(run, open_data(run.data, run.seed, run.train.batches))


def check_parameters(run: RunConfig) -> None:
    """Check the patterns that name parameters. Raises: UserError if one matches none, or nothing is left to train."""
    check_targets(run.lora, linear_names(run.model))
    table = run_table(run)
    check_patterns(run.optimizer.groups, run.train.frozen, list(table))
    if not any(parameter.is_trained for parameter in table.values()):
        raise UserError("train.frozen matches every parameter that would be trained. Leave some out.")


def _start_of(run: RunConfig) -> Path | None:
    """Return the weights that a run starts from; beside an adapter a run's checkpoint, since the newest may change.

    Raises: UserError if they are those of an adapter, or an adapter has none beside it.
    """
    weights = run.model.weights
    if weights is None and run.lora.rank:
        raise UserError(
            f"lora.rank = {run.lora.rank}: an adapter is trained beside pretrained weights, and model.weights names "
            "none. Give a Hugging Face folder, hf://OWNER/NAME or a run folder."
        )
    if weights is None or is_model_folder(weights):
        return weights
    try:
        found = store.find(weights, lambda checkpoint: None)
    except UserError:
        if run.lora.rank:
            raise
        return weights  # a run that goes on needs them no more
    store.refuse_adapter_alone(weights, found)
    return found.folder.absolute() if run.lora.rank else weights


def prepare_shown(run: RunConfig, progress: Progress) -> Manifest:
    """Prepare the run's data, show how far that is, and return their manifest. Raises: as `prepare`."""

    def show(state: PrepareProgress) -> None:
        progress.note(str(state), last=state.stage == "done")

    try:
        return prepare(run.data.prepare, show, run.extend)
    except (UserError, DataError, RunFailed) as error:
        raise type(error)(by_option(str(error), of_run=True)) from None


def prepare_as_trained(run: RunConfig, progress: Progress) -> Manifest:
    """Prepare the data of a run as its training would, with the tokenizer of its weights and for its objective.

    Raises: as `prepare_shown`; UserError for a tokenizer other than that of the weights.
    """
    theirs = None if run.model.weights is None else tokenizer_of(run.model.weights)
    return prepare_shown(_with_what_to_prepare(run, theirs), progress)


def _with_what_to_prepare(run: RunConfig, theirs: bytes | None) -> RunConfig:
    """Return the run with what its weights and objective say of the data to prepare; theirs: the tokenizer of its
    weights. Raises: UserError."""
    run = _with_objective(_with_tokenizer(run, theirs))
    _check_tokenizer_to_prepare(run, theirs)
    return run


def _with_tokenizer(run: RunConfig, tokenizer: bytes | None) -> RunConfig:
    """Return the run such that its text is prepared with the tokenizer of its weights, if it names no other.

    That of a URL is kept in a folder beside the prepared data, with the chat template. Raises: UserError if the weights
    have none: a new one would give the text ids that mean something else to them.
    """
    prepare, weights = run.data.prepare, run.model.weights
    if not prepare.input or prepare.tokenizer or weights is None:
        return run
    folder = weights
    if tokenizer is None and (prepare.out / MANIFEST).exists():
        return run
    if tokenizer is None:
        raise UserError(
            f"model.weights = {spelled(weights)}: {TOKENIZER} is not there, and the tokens of a new tokenizer mean "
            "nothing to these weights. Name theirs in data.prepare.tokenizer. Of other files (tokenizer.model, "
            f"vocab.json) transformers makes it: AutoTokenizer.from_pretrained({spelled(weights)!r})"
            ".save_pretrained(FOLDER)"
        )
    if tokenizer is not None and is_url(weights):
        folder = prepare.out.with_name(f"{prepare.out.name}-tokenizer")
        make_folder(folder)
        for name, content in {TOKENIZER: tokenizer, **usage_of(weights)}.items():
            with atomic_write(folder / name) as file:
                file.write(content)
    return run.with_keys(data={"prepare": {"tokenizer": folder}})


def _with_objective(run: RunConfig) -> RunConfig:
    """Return the run with what its objective says of the data to prepare. Raises: UserError."""
    prepare, objective = run.data.prepare, run.train.objective
    if not prepare.input or objective == "pretrain":
        return run
    try:
        prepare = PrepareConfig(**{**prepare.model_dump(), "objective": objective, "seq_len": run.data.seq_len})
    except ValidationError as error:
        raise UserError(f"data.prepare with train.objective = {objective}: {first_error(error)}") from None
    return run.with_keys(data={"prepare": prepare})


def _check_objective(run: RunConfig, data: OpenData) -> None:
    """Refuse data that the objective cannot learn from. Raises: UserError."""
    rows = {source.name: source.manifest.rows for source in data.sources}
    objective = run.train.objective
    kinds = {name: None if found is None else found.kind for name, found in rows.items()}
    wrong = {name: kind for name, kind in kinds.items() if kind not in (None, row_kind(objective))}
    if objective != "pretrain" and (wrong or (run.train.has_preferences and None in kinds.values())):
        name, kind = next(iter((wrong or kinds).items()))
        raise UserError(
            f'train.objective = "{objective}": {name} holds {kind or "text"}, and {row_kind(objective)} are what it '
            f"learns from. Prepare some: argosy prepare ... --objective {objective} --out NEW-FOLDER"
        )
    packed = next((name for name, found in rows.items() if found is not None), None)
    if objective == "pretrain" and packed is not None:
        raise UserError(
            f'train.objective = "pretrain": {packed} holds conversations, of which the answers alone are learned. Set '
            'train.objective = "sft".'
        )
    if objective != "pretrain" and packed is None:
        raise UserError(
            f'train.objective = "{objective}": {next(iter(rows))} holds text, and no conversations. Prepare some: '
            f"argosy prepare chats.jsonl --objective {objective} --tokenizer MODEL --out NEW-FOLDER"
        )


def _check_tokenizer_to_prepare(run: RunConfig, theirs: bytes | None) -> None:
    """Refuse text that is still to be prepared with another tokenizer than that of the weights. Raises: UserError."""
    if run.data.prepare.input:
        given = run.data.prepare.tokenizer
        sha256 = Tokenizer.load(given).sha256 if given else ""
        _check_tokenizer(
            run, theirs, sha256, f"data.prepare.tokenizer = {given or 'none'} gives the data another tokenizer"
        )


def _check_tokenizer(run: RunConfig, theirs: bytes | None, sha256: str, what: str) -> None:
    """Refuse weights that know other tokens than the data. theirs: their tokenizer.json. Raises: UserError."""
    weights = run.model.weights
    if weights is None or theirs is None or hashlib.sha256(theirs).hexdigest() == sha256:
        return
    raise UserError(
        f"model.weights = {spelled(weights)}: {what}, whose tokens mean something else to these weights. Prepare the "
        f"text with theirs ({how_to_prepare(spelled(weights))}), and name the new folder in data.sources."
    )


def check_data(run: RunConfig) -> None:
    """Check that there are data to train on, or input of which they will be made; nothing is prepared.

    Raises: UserError if there are none, or a folder of them cannot be read.
    """
    making = run.data.prepare
    if not (making.input or run.data.sources):
        raise UserError(
            "there is no data to train on. Give data.sources (folders that `argosy prepare` wrote), or "
            "data.prepare.input (text to prepare)."
        )
    for source in run.data.sources:
        if not is_url(source) and not (making.input and Path(source) == making.out):
            Manifest.load(Path(source), check_shards=False)


def _with_data(run: RunConfig, progress: Progress) -> RunConfig:
    check_data(run)
    if run.data.prepare.input:
        is_prepared, remote = (run.data.prepare.out / MANIFEST).exists(), run.data.prepare.remote
        if remote:
            check_remote(remote)
        manifest = prepare_shown(run, progress)
        if remote:
            upload(run.data.prepare.out, remote)
        if not is_prepared:
            progress.close()
            progress.say(printable(f"{run.data.prepare.out}: {manifest.in_words('--data.prepare.extensions')}"))
    if run.data.sources:
        return run
    return run.with_keys(data={"sources": {str(run.data.prepare.out): 1.0}})


def check_memory(run: RunConfig, plan: Plan, devices: Devices) -> None:
    """Refuse a plan that is predicted, nine times of ten, to need more memory than device, host or process may have.

    Raises: UserError with the nearest plan that fits.
    """
    if run.launch.allow_memory:
        return
    costs = costs_of(run, machine_for(run, devices), devices.count)
    here = min(devices.count, devices.per_node or -(-devices.count // run.launch.nodes))
    on_device, on_host = least_memory_bytes(costs, plan)
    host = min(host_memory_bytes() / (here * _sites_here(run)), process_memory_bytes())
    if devices.kind == "cpu":
        on_host, device = on_device + on_host, host
    else:
        device = float(costs.rates.memory_bytes)
    if on_device <= device and on_host <= host:
        return
    if devices.kind == "cpu" or on_device <= device:
        needs, has, what = on_host, host, "of the host's memory for each process"
    else:
        needs, has, what = on_device, device, "of each device"
    remedy = "No plan fits here: take a smaller model or more devices (`argosy plan` says how many)."
    with suppress(UserError):  # no plan is legal
        found = search_to_run(with_memory(costs, device, host), pins_of(plan, {"precision", "sync"}, is_auto=True))
        row = nearest_that_fits(plan, found)
        if row is not None:
            remedy = f'The nearest plan that fits: "{found.plans.plan(row)}".'
    raise UserError(
        f'plan = "{plan}" needs at least {needs / GIB:.1f} GiB {what}, which may take {has / GIB:.1f} GiB. {remedy} '
        "--launch.allow-memory starts it all the same."
    )


def _sites_here(run: RunConfig) -> int:
    """Return how many of the run's sites share this one's machine, by their addresses."""
    hosts = {site.name: host_and_port(site.address)[0] for site in run.sites if site.address}
    return max(1, list(hosts.values()).count(hosts.get(run.site, "no address")))


def check_profiled_steps(run: RunConfig) -> None:
    """Refuse to profile steps that the run does not have. Raises: UserError."""
    profile, steps = run.observe.profile, run.train.steps
    last = profile.range[-1] if profile.steps else -1
    if steps and last >= steps:
        raise UserError(
            f"observe.profile.steps = {profile.steps} ends with step {last}, but the run has the steps 0 to "
            f"{steps - 1} (train.steps = {steps}). Try {max(0, steps - 3)}:{steps}, or more steps."
        )


def check_profile(run: RunConfig, plan: Plan) -> None:
    """Refuse to profile steps or ranks that the run does not have. Raises: UserError."""
    check_profiled_steps(run)
    profile = run.observe.profile
    missing = sorted(rank for rank in profile.chosen or () if profile.steps and rank >= plan.world_size)
    if missing:
        raise UserError(
            f"observe.profile.ranks = {profile.ranks} names rank {missing[0]}, but the plan {plan} has the ranks 0 to "
            f"{plan.world_size - 1}. Try 0, or nodes for the first rank of each node."
        )
