"""A Hugging Face cache that grows in place: `generate(..., cache=VmmCache(...))`.

`DynamicCache` writes all of K and V anew for each token. Here a token is written where it stays, and attention reads a
strided view of the rows. Of transformers it depends on `DynamicCache`, which chooses a kind of layer for each layer of
a config, and on the methods of a cache that `generate` and models call.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers import cache_utils as theirs

from .. import errors
from ..cache import KVCache
from ..layout import kv_dtype_from_name
from ..pool import FramePool
from .batch import Limits, Pools
from .compiled_layers import CompiledLayerGroup, VmmCompiledLayer
from .layer_group import NO_ROOM, LayerGroup, Passes
from .layers import VmmHybridLayer, VmmLayer, forget_states
from .row_writes import check_kv
from .stand_ins import NAME, attention_of

NOT_COMPILED = frozenset({"moshi", "prophetnet"})  # types of models that cannot run with `compile=True`
HYBRIDS = theirs.LinearAttentionAndFullAttentionLayer, theirs.LinearAttentionAndSlidingWindowAttentionLayer
TAKES_NO_STRIDES = frozenset({"gpt_neox_japanese"})  # types of models that call `view` on K and V


class VmmCache(theirs.DynamicCache):
    """K and V in rows of virtual memory: for `generate(..., cache=cache)`, or `model(...)` by hand, for inference only.

    Before transformers 5.24 the argument is called `past_key_values`.

    Pages are taken as tokens arrive, on the device of the first K and V and in their dtype (the wider one of two);
    layers with a sliding window give theirs back. `reset()` makes room for another batch, of any size, and leaves the
    pages mapped for it. `trim()` of each of the `pools` gives them back to the system, and so does the end of the
    cache. `copy.deepcopy` forks: full pages are shared, the rest is copied. Beams, and the copies that
    `batch_repeat_interleave` makes, share pages likewise. It cannot be pickled.

    Full attention and each window have rows of their own, on each device that layers are on; all of them, and all
    copies of the cache, lie on one `FramePool` of their device. With `pool` they share it with other models, the other
    half of an `EncoderDecoderCache`, or a `KVCache`.

    Attention reads strided views. Torch's memory-efficient SDPA computes strides in 32 bits, so layers share a token
    record only as far as it can address `max_seq_len` tokens: the longer the rows, the coarser the pages.

    After a forward pass that ended in the middle (an error, Ctrl-C) its layers are out of step: the next one raises
    `UnfinishedPassError`, until `reset()`.

    Args:
        config: of the model. What layers keep beside K and V stays as `DynamicCache` has it, and so do layers of kinds
            that vmmkv does not know: a `KeptLayersWarning` names them.
        max_seq_len: tokens that a sequence may have, prompt included. Virtual addresses only.
        max_batch_size: sequences at a time, beams and returned sequences counted. Virtual addresses only.
        max_bytes: the most that all layers on a device may take together: bytes, `"20GiB"`, or a share of the memory
            that is free when K and V first come there; None is 80 % of it.
        page_size: bytes of a page; None is 2 MiB.
        pool: physical memory shared with others, instead of `max_bytes` and `page_size`: for models on its device.
        lookahead: tokens that a thread maps behind each sequence before it needs them, as in `KVCache`: None is one
            page of them on a GPU, 0 is no thread.
        compile: keep the length on the device, so that one compiled forward pass, or CUDA graph, serves every length;
            `generate` compiles by itself then (on a GPU). For models with `attn_implementation="vmmkv"`, the only
            attention that can read K and V behind the prompt. Where its kernels do not take K and V (on the CPU, in
            some dtypes and head sizes) a warning says so, and the cache works uncompiled.
        kv_dtype: "fp8" (e4m3fn) or "int8": K and V are quantized as they are appended, with a scale of each token and
            head (`KVLayout(scales="token_head")`). attn_implementation="vmmkv" reads them as they are; for any other
            attention a layer's K and V are dequantized in each forward pass. The first tokens of a sequence attend to
            their K and V as the model made them. None: the dtype that they come in.
        offloading: refused; exists for code that makes caches by `type(cache)(...)`, as with `DynamicCache`.

    Raises:
        ArgumentError: `config` or `max_seq_len` is missing or has the wrong type, or `compile=True` for a model that
            runs another attention.
        ValueError: `max_bytes` or `page_size` is given with a pool.
        LayoutError, BudgetError: a number is out of range; or, at the first write, rows take more virtual addresses
            than there are, or the device has less memory.
        DeviceError: at the first write: the pool is on another device.
        DtypeError: there is no such kv_dtype.
        UnsupportedError: offloading; or `compile=True` with a kv_dtype, or for a model that cannot run with it.
    """

    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig,
        max_seq_len: int | None = None,
        *,
        max_batch_size: int = 64,
        max_bytes: float | str | None = None,
        page_size: int | None = None,
        pool: FramePool | None = None,
        lookahead: int | None = None,
        compile: bool = False,
        kv_dtype: str | None = None,
        offloading: bool = False,
    ) -> None:
        if not isinstance(config, PreTrainedConfig) or max_seq_len is None:
            raise errors.ArgumentError(
                f"got a {type(config).__name__} as config, and max_seq_len={max_seq_len!r}; make a cache by "
                "VmmCache(model.config, max_seq_len), with the tokens that a sequence may have. Give code that makes "
                "caches of the same type (T5Gemma, RAG, torch.nn.DataParallel) a DynamicCache"
            )
        text = config.get_text_config(decoder=True)
        for is_asked, what in (
            (offloading, "offloading; rows stay where attention reads them. DynamicCache(offloading=True) moves them"),
            (compile and kv_dtype, f"kv_dtype={kv_dtype!r} with compile=True; leave one out"),
            (compile and text.model_type in NOT_COMPILED, f"compile=True for {text.model_type}, which attends by code "
             "of its own that reads rows to their end, or without the windows of its layers. Leave it out"),
        ):  # fmt: skip
            if is_asked:
                raise errors.UnsupportedError(f"asked for {what}")
        if compile and attention_of(config) != NAME:
            raise errors.ArgumentError(
                f"asked for compile=True for a model with attn_implementation={attention_of(config)!r}, which reads "
                f'rows to their end, where no memory is; load it with attn_implementation="{NAME}", or make the cache '
                "without compile=True"
            )
        kept_dtype = kv_dtype_from_name(kv_dtype)
        super().__init__(config=config)
        self._limits = Limits(max_seq_len, max_batch_size, lookahead, kv_dtype=kept_dtype)
        self._pools, self._passes, self._is_compiled = Pools(max_bytes, page_size, pool), Passes(), compile
        self._copies = text.model_type in TAKES_NO_STRIDES
        self._config = config if kept_dtype else None
        self._groups: list[Any] = []  # one for each window, on each device
        self.layers[:] = [self._with_rows(layer, index) for index, layer in enumerate(self.layers)]
        self._tell_what_is_kept()

    def _group(self, window: int | None) -> Any:
        """The group for layers of a window, while no layer is on a device yet."""
        found = next((group for group in self._groups if group.window == window), None)
        if found is None:
            kind = CompiledLayerGroup if self._is_compiled else LayerGroup
            self._groups.append(found := kind(self._limits, self._pools, self._passes, window, self._config))
        return found

    def _with_rows(self, layer: Any, layer_idx: int) -> Any:
        """The layer on rows that takes the place of a layer of transformers, or that layer."""
        kind, window = type(layer), getattr(layer, "sliding_window", None)  # exactly: a subclass may keep, or do, more
        if kind in (theirs.DynamicLayer, theirs.DynamicSlidingWindowLayer):
            group = self._group(window)
            return VmmCompiledLayer(self._groups, group, layer_idx) if self._is_compiled else VmmLayer(group, layer_idx)
        if not self._is_compiled and kind in HYBRIDS:
            return VmmHybridLayer(self._group(window), layer_idx, layer.number_of_states)
        return layer

    def _tell_what_is_kept(self) -> None:
        """Names the layers that there are no rows for."""
        kept: defaultdict[str, list[int]] = defaultdict(list)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, theirs.CacheLayerMixin) and not isinstance(layer, VmmLayer):
                kept[type(layer).__name__].append(index)
        names = "; ".join(f"{name}: {', '.join(map(str, layers))}" for name, layers in kept.items())
        if kept and self._is_compiled:
            raise errors.UnsupportedError(
                f"asked for compile=True; layers of these kinds cannot be read as whole rows ({names}). Make the cache "
                "without it"
            )
        if kept:
            names = f"VmmCache has no rows for layers of these kinds ({names}); they are as in DynamicCache"
        if kept or not self._groups:
            names = names or "no layer of this model keeps K and V: VmmCache does what DynamicCache does"
            warnings.warn(names, errors.KeptLayersWarning, stacklevel=3)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile: with `compile=True`."""
        return self._is_compiled and all(layer.is_compileable for layer in self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends K and V of layer `layer_idx`, `[batch_size, num_kv_heads, tokens, head_dim]`; returns K and V of the
        tokens that they attend to, `[batch_size, num_kv_heads, kv_length, head_dim]`, mostly views of the rows. Other
        arguments are ignored, as by `DynamicCache`."""
        layer = self.layers[layer_idx]
        if isinstance(layer, VmmLayer) and key_states.device != layer.home:
            check_kv(layer_idx, key_states, value_states)
            self._settle(layer, key_states.device)
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        return (keys.contiguous(), values.contiguous()) if self._copies else (keys, values)

    def _settle(self, layer: VmmLayer, device: torch.device) -> None:
        """Moves a layer without tokens, and all layers behind it, to the device of its K and V: models are cut into
        runs of layers."""
        here, window = layer.group.device, layer.group.window
        if here not in (None, device) and not layer.rows:
            behind = [each for each in self._on_rows[self._on_rows.index(layer) :] if each.group.window == window]
            if self._is_compiled or any(each.rows for each in behind):
                raise errors.DeviceError(
                    f"got K and V of layer {layer.layer_idx} on {device}; this cache keeps them on {here}. A model on "
                    "several devices needs a cache made without compile=True, and one that has moved, reset() before"
                )
            groups = [group for group in self._groups if group.window == window]
            kept = [len(group.layers) - sum(each.group is group for each in behind) for group in groups]
            batches = [group.batch_of_first(num_layers) for group, num_layers in zip(groups, kept)]
            for group, num_layers, batch in zip(groups, kept, batches):
                group.keep_first(num_layers, batch)
            new = LayerGroup(self._limits, self._pools, self._passes, window, self._config)
            target = next((group for group in groups if group.device == device), new)
            for each in behind:
                each.join(target)
            self._groups = [group for group in dict.fromkeys([*self._groups, target]) if group.layers]
        layer.home = device

    @property
    def kv_caches(self) -> list[KVCache]:
        """The caches of K and V, for accounting: one for full attention, and one for each window, on each device; none
        for layers that nothing was written to."""
        return [group.batch.kv_cache for group in self._groups if group.batch]

    @property
    def pools(self) -> list[FramePool]:
        """The memory of the `kv_caches`, one pool on each device: for statistics, `set_limit()` and `trim()`."""
        return list(dict.fromkeys(kv_cache.pool for kv_cache in self.kv_caches))

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens of all layers, or, where one cannot, of none.

        Args:
            tokens_to_remove: minus their number, as transformers counts.

        Raises:
            ReleasedTokensError: a layer would need tokens that its window has left behind.
            ArgumentError, ValueError: it is no whole number, or positive.
            RuntimeError: a layer of linear attention has not recorded what it would go back to.
        """
        for on_rows in self._on_rows:
            on_rows.length_after_crop(tokens_to_remove)
        refusing = [layer for layer in self.layers if isinstance(layer, theirs.LinearAttentionCacheLayerMixin)]
        for layer in refusing:
            layer.crop(tokens_to_remove)
        with self._passes.changing(errors.StreamCaptureError):
            for layer in self.layers:
                if layer not in refusing:
                    layer.crop(tokens_to_remove)
            self._fit()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sequence i what sequence `beam_idx[i]` was: `[sequences]`, int32 or int64. There may be more or fewer
        than before.

        Raises:
            OutOfRangeError: there is no such sequence (on a GPU torch's own assertion fails, later).
            OutOfRowsError, OutOfPagesError, DriverError: there is no room for so many. Nothing has changed then.
        """
        if self._rows:
            self._select(beam_idx, lambda numbers: numbers.index_select(0, _as_index(beam_idx)))
        else:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence, its copies side by side; raises as `reorder_cache`."""
        if self._rows:
            self._select(repeats, lambda numbers: numbers.repeat_interleave(repeats))
        else:
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor | Iterable[int]) -> None:
        """Keeps the sequences that `indices` names, by numbers, or marks, by a truth value for each, and no others; of
        none of them no tokens are left. Raises as `reorder_cache`, and `ShapeError` for what is no list."""
        if self._rows:
            self._select(indices, lambda numbers: numbers[_as_index(indices)])
        else:
            super().batch_select_indices(indices)  # type: ignore[arg-type]

    @property
    def _rows(self) -> int:
        """Sequences that it holds; 0, too, where no layer keeps K and V."""
        return max((layer.rows for layer in self._on_rows), default=0)

    @property
    def _on_rows(self) -> list[VmmLayer]:
        return [layer for layer in self.layers if isinstance(layer, VmmLayer)]

    def _select(self, asked: object, choose: Callable[[Tensor], Tensor]) -> None:
        """Keeps the sequences that `choose` chooses of their numbers, in all layers or in none."""
        device = asked.device if isinstance(asked, Tensor) else None
        try:
            chosen = choose(torch.arange(self._rows, device=device))
        except (IndexError, RuntimeError, TypeError) as error:
            raise errors.OutOfRangeError(
                f"asked for sequences {asked}; the cache holds {self._rows}: {error}"
            ) from error
        if chosen.ndim != 1:
            raise errors.ShapeError(
                f"asked for sequences {asked}, which is no list of them; the cache holds {self._rows}"
            )
        if not len(chosen):
            self.reset()
            return
        indices = chosen.tolist()
        with self._passes.changing(*NO_ROOM):
            try:
                for group in self._groups:
                    group.add_rows(indices)
            except NO_ROOM:
                self._fit()
                raise
        with self._passes.changing():
            for group in self._groups:
                group.reorder(indices)
            for layer in self.layers:  # every kind of layer takes more, or fewer
                layer.reorder_states(chosen) if isinstance(layer, VmmLayer) else layer.reorder_cache(chosen)
            self._fit()

    def reset(self) -> None:
        """Drops all tokens, also after a pass that ended in the middle; their pages stay mapped for those to come."""
        self._passes.is_broken = True
        super().reset()  # type: ignore[no-untyped-call]
        for layer in self.layers:
            if type(layer) is theirs.LinearAttentionLayer and not self._is_compiled:
                forget_states(layer)
        for group in self._groups:
            group.clear()
        self._passes.is_broken = False

    def _fit(self) -> None:
        for group in self._groups:
            group.fit()


def _as_index(indices: object) -> Tensor:
    """An index that names, or marks, sequences, as torch takes it."""
    index = torch.as_tensor(indices)
    return index if index.numel() else index.long()
