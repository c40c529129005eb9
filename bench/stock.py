"""SGLang's own controller and requests, made without a server; needs the sglang package."""

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def make_controller(workers: Sequence[Any], method: str = "ROUND_ROBIN") -> Any:
    """A DataParallelController with injected attributes, as SGLang's own unit tests build it.

    workers: what stands for the socket of each rank; they need `send_pyobj`.
    """
    from sglang.srt.managers import data_parallel_controller as module

    made = module.DataParallelController.__new__(module.DataParallelController)
    made.server_args = SimpleNamespace(port=1, node_rank=0)
    made.load_balance_method = module.LoadBalanceMethod[method]
    made.round_robin_counter = made.health_round_robin_counter = 0
    made.dispatching = getattr(made, f"{method.lower()}_scheduler")
    made.refresh_load_budget_on_dispatch = False
    made.dp_budget = module.DPBudget(len(workers))
    made.status = [True] * len(workers)
    if hasattr(made, "_refresh_active_workers"):  # 0.5.16
        made._active_workers = list(range(len(workers)))
    made.workers = list(workers)
    return made


def make_request(rid: str, tokens: Iterable[int], key: str | None = None, **more: Any) -> Any:
    """A tokenized generation request as the TokenizerManager makes it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    ids = array("q", tokens)
    fields = {
        "rid": rid,
        "input_text": "text",
        # Lists up to 0.5.12.
        "input_ids": ids if "array" in str(TokenizedGenerateReqInput.__annotations__) else [*ids],
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": SamplingParams(max_new_tokens=8),
        "return_logprob": False,
        "logprob_start_len": 0,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
        "routing_key": key,
    }
    return make_message(TokenizedGenerateReqInput, fields | more)


def make_message(kind: Any, values: Mapping[str, Any]) -> Any:
    """A message of SGLang's of any release: it takes of the values what it has a field for."""
    names = getattr(kind, "__struct_fields__", None)  # dataclasses before 0.5.15
    if names is None:
        names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: value for name, value in values.items() if name in names})
