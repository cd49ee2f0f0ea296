# SPDX-License-Identifier: Apache-2.0
"""`install()`: wrap a few functions of Megatron, one idea each, and give them back on `uninstall()`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses.sigreg import UNSCALED
from simreg_megatron.plugin import clipping, compat, forms, heads, inner, learnable, stages
from simreg_megatron.plugin.arguments import (
    adagc_from_args,
    add_simreg_arguments,
    config_from_args,
    differences_to_checkpoint,
)
from simreg_megatron.plugin.clipping import Clipping
from simreg_megatron.plugin.regularizer import Regularizer, open_row_group
from simreg_megatron.plugin.reporting import add_to_console, log_once, warn, write_scalars
from simreg_megatron.plugin.sequence import fast_form

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Installation:
    """What is wrapped in this process, and with which settings."""

    def __init__(self, config: SimRegConfig | None) -> None:
        self.given_config = config
        self._regularizer: Regularizer | None = None
        self.clipping: Clipping | None = None
        self.has_met_forward = False
        self._originals: list[tuple[Any, str, Any, Any]] = []
        self.model_classes: tuple[Any, ...] = ()

    def regularizer(self) -> Regularizer:
        """Made at first use: Megatron's flags are parsed by then."""
        if self._regularizer is None:
            self._regularizer = Regularizer(self.given_config or _config_of_megatron())
            self._look_inside_if_asked(self._regularizer.config)
        return self._regularizer

    def begin_run(self) -> Regularizer:
        """A fresh regularizer: a run that Megatron restarts inside the process has new groups and counts anew."""
        self._regularizer = None
        return self.regularizer()

    def _look_inside_if_asked(self, config: SimRegConfig) -> None:
        """The decoder is wrapped only for settings that name states inside it."""
        wrapped = any(name == compat.DECODER_SEAM.name and holder.__name__ == compat.DECODER_SEAM.owner
                      for holder, name, _, _ in self._originals)  # fmt: skip
        if config.active and config.looks_inside and not wrapped:
            self.wrap(compat.DECODER_SEAM, _catch_inner_states)
            if config.layer_numbers:
                self.wrap(compat.STAGE_SEAM, _add_terms_of_stage)
                if compat.training_loop() is not None:
                    self.wrap(compat.DATA_SEAM, _build_data_of_stages)

    def wrap(self, seam: compat.Seam, wrapper: Wrapper) -> None:
        holder = seam.holder()
        original = getattr(holder, seam.name)
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(holder, seam.name, wrapped)
        self._originals.append((holder, seam.name, original, wrapped))

    def unwrap_all(self) -> None:
        """All of them, or none where someone wrapped one again since."""
        for holder, name, _, wrapped in self._originals:
            if getattr(holder, name) is not wrapped:
                raise RuntimeError(
                    f"{getattr(holder, '__name__', holder)}.{name} was wrapped again after SimReg: undo that first"
                )
        while self._originals:
            holder, name, original, _ = self._originals.pop()
            setattr(holder, name, original)


_installation: _Installation | None = None


def install(config: SimRegConfig | None = None) -> None:
    """Wrap Megatron's functions; see `simreg_megatron.install`."""
    global _installation
    if _installation is not None:
        if _installation.given_config != config:
            raise ValueError("SimReg is installed with other settings already: call uninstall() first")
        return
    has_loop = compat.training_loop() is not None
    if config is None and not has_loop:
        raise compat.MegatronSeamError(
            f"megatron-core {compat.megatron_version()} comes without megatron.training, so nobody parses --simreg-* "
            "flags: pass install(config=SimRegConfig(lambda_=...)), or put a Megatron-LM source tree on PYTHONPATH"
        )
    installation = _Installation(config)
    models = compat.model_seams()
    wrappers: list[tuple[compat.Seam, Wrapper]] = [
        (seam, _regularize if seam is compat.MODEL_SEAM else _regularize_forward) for seam in models
    ]
    wrappers += [(compat.built(seam), _add_parameters) for seam in models]
    if compat.MODEL_SEAM in models:
        wrappers.append((compat.FORWARD_SEAMS[0], _refuse_own_postprocess))
    if has_loop:
        wrappers += [
            (compat.SETUP_SEAM, _refuse_what_cannot_work),
            (compat.STEP_SEAM, _tell_iteration),
            (compat.LOG_SEAM, _report),
        ]
        if config is None:
            wrappers += [(compat.ARGUMENTS_SEAM, _add_flags), (compat.RESUME_SEAM, _compare_with_checkpoint)]
            state_dict, load_state_dict = compat.SCHEDULER_SEAMS
            wrappers += [
                (state_dict, functools.partial(clipping.saving, _clipping)),
                (load_state_dict, functools.partial(clipping.loading, _clipping)),
            ]
    for seam, _ in wrappers:
        seam.holder()  # all seams are there, or nothing is wrapped
    if compat.is_untried_release():
        warn(
            f"SimReg was not yet tried with megatron-core {compat.megatron_version()}: all functions it wraps are "
            "there, so it goes on; compare a short run with --simreg-lambda 0 and without the plugin first"
        )
    for seam, wrapper in wrappers:
        installation.wrap(seam, wrapper)
    installation.model_classes = tuple(seam.holder() for seam in models)
    _installation = installation
    if config is not None:
        installation.regularizer()


def uninstall() -> None:
    """Restore every wrapped function; see `simreg_megatron.uninstall`."""
    global _installation
    if _installation is not None:
        _installation.unwrap_all()
        _installation = None


def _current() -> Regularizer:
    assert _installation is not None
    return _installation.regularizer()


def _clipping() -> Clipping | None:
    return None if _installation is None else _installation.clipping


def _config_of_megatron() -> SimRegConfig:
    from megatron.training.global_vars import get_args

    return config_from_args(get_args())


def settings() -> SimRegConfig:
    """Of the installation in this process."""
    return _current().config


def begin_foreign_run(model_chunks: Any, *, micro_batch_size: int | None = None, seq_length: int | None = None) -> None:
    """For training loops other than Megatron's own: what its wrapped set-up does before the first step.

    Args:
        micro_batch_size, seq_length: of the run, so that `--simreg-impl auto` can try what is fastest on a GPU; without
            them it is tiled.

    Raises:
        RuntimeError: SimReg is not installed.
        NotImplementedError: SimReg does not reach these models.
    """
    if _installation is None:
        raise RuntimeError("SimReg is not installed: call install(config=SimRegConfig(lambda_=...)) first")
    config = _installation.begin_run().config
    if config.active:
        _refuse_models(config, model_chunks)
        if micro_batch_size and seq_length:
            forms.settle(config, model_chunks, micro_batch_size, seq_length)
        _begin(config, model_chunks)


def begin_step(iteration: int, *, measures: bool, num_iterations: int | None = None) -> None:
    """Before step `iteration`, counted from 0, of a training of so many; `measures` the geometry of its hidden states
    for the log.

    With objective none, and where a schedule has ended, all that is computed is computed in these steps.
    """
    _current().set_iteration(iteration, num_iterations)
    _current().metrics.wants_geometry = measures


def end_foreign_step(model_chunks: Any, *, reduces: bool) -> dict[str, Any]:
    """After a step; the means since the last reduction, where the ranks are asked for them all together.

    Raises:
        MegatronSeamError: SimReg is on, and no forward pass met it.
    """
    if not _current().config.active:
        return {}
    _refuse_silence(_current(), model_chunks)
    return _reduced_means() if reduces else {}


def _regularize(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    """For models that are handed their final hidden states and the labels in one call."""
    signature = inspect.signature(postprocess)

    def with_simreg(model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = postprocess(model, *args, **kwargs)
        assert _installation is not None
        _installation.has_met_forward = True
        if not _trains(model):
            return loss
        given = compat.named_arguments(signature, model, *args, **kwargs)
        return _add_to(loss, model, given, given["hidden_states"])

    return with_simreg


def _refuse_own_postprocess(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Some frameworks give a model, and not its class, another function in the place of the wrapped one."""

    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        assert _installation is not None
        if compat.MODEL_SEAM.name not in vars(model) or not (_trains(model) and _current().config.active):
            return forward(model, *args, **kwargs)
        _installation.has_met_forward = False
        found = forward(model, *args, **kwargs)
        if not _installation.has_met_forward:
            raise NotImplementedError(
                f"this {type(model).__name__} has a {compat.MODEL_SEAM.name} of its own, which hides the one "
                "that SimReg wraps: let it call the class's, or set --simreg-lambda 0"
            )
        return found

    return checked


def _regularize_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For models that compute their loss inside `forward`: the decoder's output is caught on the way."""
    signature = inspect.signature(forward)

    def with_simreg(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not (_trains(model) and _current().config.active):
            return forward(model, *args, **kwargs)
        caught: list[Any] = []
        handle = model.decoder.register_forward_hook(lambda module, inputs, output: caught.append(output))
        try:
            loss = forward(model, *args, **kwargs)
        finally:
            handle.remove()
        given = compat.named_arguments(signature, model, *args, **kwargs)
        hidden_states = caught[-1]
        return _add_to(loss, model, given, hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states)

    return with_simreg


def _add_parameters(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Parameters that an objective trains belong to the model from its birth on, before anyone wraps or loads it."""

    def with_parameters(model: Any, *args: Any, **kwargs: Any) -> None:
        initialize(model, *args, **kwargs)
        if _wants_parameters():
            learnable.add_to(model, learnable.wanted(_current().config))

    return with_parameters


def _wants_parameters() -> bool:
    """Whether the settings ask for any; without settings, or before Megatron knows its own, none are asked for."""
    assert _installation is not None
    if _installation.given_config is None and not compat.has_parsed_arguments():
        return False
    config = _current().config
    return config.active and bool(learnable.wanted(config))


def _trains(model: Any) -> bool:
    return bool(model.post_process and model.training and torch.is_grad_enabled())


def _add_to(loss: Any, model: Any, given: dict[str, Any], hidden_states: Any) -> Any:
    labels = given.get("labels")
    if labels is None or given.get("inference_context") is not None or not _current().config.active:
        return loss
    _refuse_unknown_loss(model, given, loss)
    return _current().add_to(
        loss,
        model,
        hidden_states=hidden_states,
        labels=labels,
        loss_mask=given.get("loss_mask"),
        packed_seq_params=given.get("packed_seq_params"),
    )


def _catch_inner_states(forward: Callable[..., Any]) -> Callable[..., Any]:
    def caught(decoder: Any, *args: Any, **kwargs: Any) -> Any:
        states = _current().inner_states
        if not (_current().computes and inner.wants(states.config, decoder)):
            return forward(decoder, *args, **kwargs)
        return states.catch(forward, decoder, *args, **kwargs)

    return caught


def _add_terms_of_stage(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """One micro-batch of one part of the model, as Megatron's pipeline schedules run it."""
    signature = inspect.signature(forward_step)

    def with_terms(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        (model,) = compat.unwrapped(given["model"])
        trains = model.training and torch.is_grad_enabled() and not given.get("collect_non_loss_data")
        if trains and inner.holds_earlier_layers(_current().config, model):
            given["forward_step_func"] = stages.with_terms(
                given["forward_step_func"], _current().add_to_stage, given["config"], given["num_microbatches"]
            )
        return forward_step(*bound.args, **bound.kwargs)

    return with_terms


def _build_data_of_stages(build_iterators: Callable[..., Any]) -> Callable[..., Any]:
    return lambda provider, *args, **kwargs: _current().data_of_stages.build(build_iterators, provider, *args, **kwargs)


def _refuse_unknown_loss(model: Any, given: dict[str, Any], loss: Any) -> None:
    """SimReg needs Megatron's own per-token loss, and rows that lie over the ranks as it knows."""
    if given.get("packed_seq_params") is not None and compat.context_group(model).size() > 1:
        raise NotImplementedError(_PACKED_AND_SPLIT)
    if given.get("output_processor") is not None or loss.shape != given["labels"].shape:
        raise NotImplementedError(
            "SimReg adds to Megatron's per-token loss, and an output processor returns something else here: "
            "drop the processor, or set --simreg-lambda 0"
        )


_PACKED_AND_SPLIT = (
    "SimReg does not follow how packed sequences are cut over context-parallel ranks: train them with "
    "--context-parallel-size 1, or unpacked (drop --sft and --dataloader-inter-document-masking), "
    "or set --simreg-lambda 0"
)


def _add_flags(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parser: add_simreg_arguments(add_megatron_arguments(parser))


def _refuse_what_cannot_work(setup_model_and_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        assert _installation is not None
        regularizer = _installation.begin_run()
        _installation.clipping = _begin_clipping(get_args()) if _installation.given_config is None else None
        if regularizer.config.active:
            refuse_arguments(get_args(), regularizer.config)
        try:
            built = setup_model_and_optimizer(*args, **kwargs)
        except Exception as error:
            learnable.explain(error, regularizer.config)
            raise
        if regularizer.config.active:
            _refuse_models(regularizer.config, built[0])
            forms.settle(regularizer.config, built[0], get_args().micro_batch_size, get_args().seq_length)
            _begin(regularizer.config, built[0])
            regularizer.data_of_stages.begin(compat.unwrapped(built[0]))
            if regularizer.config.document_mask:
                regularizer.end_of_document = _end_of_document()
        if built[1] is None:  # --skip-train
            _installation.clipping = None
        if _installation.clipping is not None:
            _installation.clipping.attach(built[1], built[0])
        return built

    return checked


def _begin_clipping(args: Any) -> Clipping | None:
    config = adagc_from_args(args)
    return None if config is None else Clipping(config)


def refuse_arguments(args: Any, config: SimRegConfig) -> None:
    """Refuse flags of Megatron under which SimReg would be wrong, or silent.

    Raises:
        ValueError, NotImplementedError: there is one; the sentence names it and the way out.
    """
    interval = config.log_interval
    if interval is not None and interval % args.log_interval:
        raise ValueError(
            f"--simreg-log-interval {interval} must be a multiple of --log-interval {args.log_interval}: "
            "SimReg's values appear in Megatron's own log line"
        )
    iterations = getattr(args, "train_iters", None)
    if config.schedule.needs_length and iterations:  # with samples Megatron counts them later
        config.schedule.factor(0, iterations)  # refuses a training that is too short for it
    if "full_iteration" in f"{getattr(args, 'cuda_graph_impl', '')} {getattr(args, 'cuda_graph_scope', '')}":
        raise NotImplementedError(
            "SimReg has not been shown to work inside full-iteration CUDA graphs: capture layers only, "
            "or set --simreg-lambda 0"
        )
    if config.looks_inside:
        inner.refuse_arguments(config, args)
    sharded = [
        name for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp") if getattr(args, name, False)
    ]
    for part in config.parts:
        if (part.meets_heads or part.through_head) and sharded:
            who = f"SimReg objective {part.objective}" if part.through_head else "pairs=hidden-head"
            raise NotImplementedError(
                f"{who} needs the output layer's rows on each rank, and --{sharded[0].replace('_', '-')} scatters "
                "them: drop one of them"
            )
        if part.by_sequence:
            _refuse_lonely_sequences(args, part)
        if part.prefixes:
            _refuse_prefixes(args.hidden_size, part)
    packed = getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)
    if getattr(args, "hybrid_context_parallel", False) or (packed and getattr(args, "context_parallel_size", 1) > 1):
        raise NotImplementedError(_PACKED_AND_SPLIT)
    for part in config.parts:
        of_rows = part.by_sequence or part.options.get("sample") == "chunk" or part.objective == "mic"
        if packed and of_rows:
            raise NotImplementedError(
                f"SimReg objective {part.objective} takes a row for one sequence, and packed rows hold several: "
                "train unpacked (drop --sft and --dataloader-inter-document-masking), or choose another objective"
            )
    if packed and getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise NotImplementedError(
            "Megatron does not tell the model where packed sequences begin under --overlap-moe-expert-parallel-comm, "
            "so SimReg would mix them: drop that flag, train unpacked, or set --simreg-lambda 0"
        )


def _refuse_prefixes(hidden_size: int, config: SimRegConfig) -> None:
    # MIC compares with the rest, and all features are what the language-model loss itself has.
    most = hidden_size - 1 if config.objective in ("mic", "prefixes-ce") else hidden_size
    if config.prefixes[-1] > most:
        raise ValueError(
            f"SimReg objective {config.objective} cannot take {config.prefixes[-1]} features of states of width "
            f"{hidden_size}: give prefixes of at most {most}"
        )


def _refuse_lonely_sequences(args: Any, config: SimRegConfig) -> None:
    """A sequence without another one to be compared with has no term."""
    gathers = config.options.get("gather") == "yes"
    if args.micro_batch_size * (args.data_parallel_size if gathers else 1) < 2:
        whose = "of all data-parallel ranks, of which there is one" if gathers else "of a micro-batch"
        raise ValueError(
            f"SimReg objective {config.objective} compares the sequences {whose}, and --micro-batch-size is "
            f"{args.micro_batch_size}: give at least 2"
        )


def _end_of_document() -> int:
    """Token id that ends a document in Megatron's data sets."""
    from megatron.training.global_vars import get_tokenizer

    try:
        return int(get_tokenizer().eod)
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            "--simreg-document-mask has no effect with a tokenizer that has no end-of-document token: "
            "use another tokenizer, or drop it"
        ) from error


def _begin(config: SimRegConfig, model_chunks: Any) -> None:
    """Open what ranks exchange rows through, and say what each objective does."""
    for model in compat.unwrapped(model_chunks):
        if getattr(model, "post_process", True) or inner.holds_earlier_layers(config, model):
            open_row_group(model)
    for part in config.parts:
        _announce(part, model_chunks)


def _refuse_models(config: SimRegConfig, model_chunks: Any) -> None:
    """A model that never passes a wrapped function would train without SimReg and say nothing."""
    assert _installation is not None
    for model in compat.unwrapped(model_chunks):
        if not getattr(model, "post_process", True):
            if inner.holds_earlier_layers(config, model):
                stages.refuse(config, model)
            continue
        if not isinstance(model, _installation.model_classes):
            known = " and ".join(known.__name__ for known in _installation.model_classes)
            raise NotImplementedError(
                f"SimReg reaches {known} only, and this run builds {type(model).__name__}: set --simreg-lambda 0 for it"
            )
        if config.looks_inside:
            inner.refuse_decoder(config, model.decoder)
            stages.announce(config, model.decoder)
        for part in config.parts:
            if part.through_head:
                heads.refuse_second_use(model, part.objective)


def _announce(config: SimRegConfig, model_chunks: Any) -> None:
    from megatron.core.utils import get_model_config

    hidden_size = get_model_config(model_chunks[0]).hidden_size
    asked = " (auto)" if config.lambda_ == "auto" else ""
    changes = f" {config.schedule}" if str(config.schedule) else ""
    if config.every > 1:
        changes += f" times {config.every} in every step of {config.every} (another objective)"
    what = (
        f"lambda {config.weight(hidden_size):g}{asked}{changes}"
        if config.trains
        else "measured only, in log steps, not trained on"
    )
    options = "".join(f", {name} {value}" for name, value in config.objective_options if value != "whole")
    if config.options.get("normalize") == "unit":
        warn(f"SimReg objective {config.objective}: {UNSCALED}")
    if config.objective == "placebo":
        warn(
            "SimReg objective placebo: labels are moved around inside each chunk; this is a control and should not help"
        )
    if config.by_sequence:
        log_once(f"SimReg objective {config.objective}: {what}, temperature {config.tau:g}, whole sequences{options}")
        return
    if config.through_head:
        log_once(f"SimReg objective {config.objective}: {what}{options}")
        return
    if config.sums_up:
        log_once(f"SimReg objective {config.objective}: {what}, chunk size {config.chunk_size}{options}")
        return
    chunk = f"chunks of {config.chunk_size} tokens" if config.chunk_size else "whole sequences"
    name = "SimReg" if config.objective in ("simreg", "none") else f"SimReg objective {config.objective}"
    impl = fast_form(config, forms.rows_like(compat.unwrapped(model_chunks)[0])) or "reference"
    log_once(f"{name}: {what}, temperature {config.tau:g}, {chunk}, scope {config.scope}, impl {impl}{options}")


def _tell_iteration(train_step: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(train_step)

    def with_iteration(*args: Any, **kwargs: Any) -> Any:
        if not _current().config.active:
            return train_step(*args, **kwargs)
        given = compat.named_arguments(signature, *args, **kwargs)
        iteration = given.get("iteration")
        iteration = _iteration_of_args() if iteration is None else iteration
        is_first = not _current().follows_iterations  # Megatron prints a line after it, in a resumed run, too
        measures = is_first or _is_log_step(iteration + 1)
        begin_step(iteration, measures=measures, num_iterations=_iterations_of_args())
        result = train_step(*args, **kwargs)
        _refuse_silence(_current(), given["model"])
        return result

    return with_iteration


def _refuse_silence(regularizer: Regularizer, model_chunks: Any) -> None:
    """A model that overrides the wrapped function without calling it would train without SimReg."""
    if regularizer.has_met_model:
        return
    for model in compat.unwrapped(model_chunks):
        if getattr(model, "post_process", True) or inner.holds_earlier_layers(regularizer.config, model):
            raise compat.MegatronSeamError(
                f"SimReg is on, but {type(model).__name__} computed its loss without passing the function that SimReg "
                "wraps: let its override call super(), or set --simreg-lambda 0"
            )


def _iteration_of_args() -> int:
    from megatron.training.global_vars import get_args

    return int(getattr(get_args(), "curr_iteration", 0))


def _iterations_of_args() -> int | None:
    """Of the whole training; Megatron counts them, too, where it is given samples."""
    from megatron.training.global_vars import get_args

    iterations: int | None = getattr(get_args(), "train_iters", None)
    return iterations


def _is_log_step(iteration: int) -> bool:
    from megatron.training.global_vars import get_args

    return iteration % (_current().config.log_interval or get_args().log_interval) == 0


def _report(training_log: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(training_log)

    def with_simreg(*args: Any, **kwargs: Any) -> Any:
        given = compat.named_arguments(signature, *args, **kwargs)
        first, iteration = bool(given.get("is_first_iteration")), given["iteration"]
        adaptive = _clipping()
        if not (_current().config.active or adaptive) or not (first or _is_log_step(iteration)):
            return training_log(*args, **kwargs)
        total_loss_dict = given["total_loss_dict"]
        means = _reduced_means(reset=not first) if _current().config.active else {}
        if adaptive is not None:
            means |= adaptive.means(reset=not first)
        add_to_console(means, total_loss_dict, skipped=bool(given["skipped_iter"]))
        if not first:
            write_scalars(means, iteration)
        result = training_log(*args, **kwargs)
        for name in means:  # interval means, not sums: Megatron must not go on adding to them
            total_loss_dict.pop(name, None)
        return result

    return with_simreg


def _reduced_means(*, reset: bool = True) -> dict[str, Any]:
    """Of all ranks: a collective on those that saw SimReg, and on all where earlier stages may have.

    Where SimReg only measures, the values are of a log step alone, and gone afterwards in any case.
    """
    config = _current().config
    pipeline = compat.pipeline_group() if config.layer_numbers else None
    several = pipeline if pipeline is not None and pipeline.size() > 1 else None
    means = _current().metrics.reduce(_data_group(), several, reset=reset or not _current().trains)
    return means | _current().lambdas() if means else {}


def _data_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _compare_with_checkpoint(check_checkpoint_args: Callable[..., Any]) -> Callable[..., Any]:
    def compared(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        for difference in differences_to_checkpoint(checkpoint_args, get_args()):
            log_once(f"SimReg: {difference}")
        return check_checkpoint_args(checkpoint_args, *args, **kwargs)

    return compared
