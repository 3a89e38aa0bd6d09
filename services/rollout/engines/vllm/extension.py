"""Methods that vLLM adds to its worker class, called through `collective_rpc`; this file is imported in vLLM's
worker processes.

On a CPU vLLM multiplies by packed copies of the weights and drops the originals. This file relies on two facts:
a layer with such a copy has `cpu_linear`, and `dispatch_cpu_unquantized_gemm` makes the copy.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rolemesh.services.rollout.engines.vllm.reload import whole_loads
from rolemesh.v1.weights_pb2 import SharedRegion, WeightManifest
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.tensors import RegionTensors
from rolemesh.wire.dtypes import FROM_WIRE

if TYPE_CHECKING:  # vLLM takes the second on a GPU that has Triton, else the first
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

LIBC = ctypes.CDLL(None)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Of a mixture of experts: three-dimensional in vLLM, and in transformers from version 5 on.
EXPERTS = {"routed_experts.w13_weight": "gate_up_proj", "routed_experts.w2_weight": "down_proj"}


class RolloutExtension:
    """The methods that the engine calls on each rank."""

    model_runner: GPUModelRunner | GPUModelRunnerV2
    reload_weights: Callable[..., None]  # the worker's own: it loads under vLLM's current configuration
    _file: Any  # the released memory: the matrices of _only_packed, then every storage
    _only_packed: list[tuple[Any, torch.Size, torch.dtype]]

    def take_weights(self, path: str, name: str, manifest: bytes) -> None:
        """Load the tensors of a version, under their Hugging Face names, into vLLM's layers.

        Each rank reads them where they lie, in the region.

        Raises:
            WeightsUnavailable: the region cannot be mapped.
            ValueError: a layer of vLLM would lack some of its weights.
        """
        weights = RegionTensors.at((path, name, manifest))
        # vLLM warns at every load about a head that is tied to the embedding. Here, missing weights raise.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        with whole_loads(self.model_runner.get_model()):
            self.reload_weights(weights_iterator=iter(weights.items()))
        self.pack_tied()

    def pack_tied(self) -> None:
        """Pack the layers that a reload on a CPU does not pack.

        A reload packs only layers that get weights. A head that is tied to the embedding gets none, so it would
        silently keep its old copy.
        """
        for layer in self._packed_layers():
            if layer.weight.numel():
                _pack(layer, remove_weight=False)

    def has_loose_tensors(self) -> bool:
        """Whether a layer's attention has tensors on the GPU that are neither parameters nor buffers.

        ALiBi's slopes are. A sleep that drops weights drops these too, and no load brings them back.
        """
        model = self.model_runner.get_model()
        known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        return any(
            isinstance(tensor, Tensor) and tensor.is_cuda and id(tensor) not in known
            for module in model.modules()
            if hasattr(module, "impl")
            for tensor in vars(module.impl).values()
        )

    def give_weights(self, path: str, name: str, manifest: bytes) -> list[str]:
        """Write the layers' weights to a region, under Hugging Face names. Works only with one rank.

        A packed copy is read by multiplying it with the unit matrix, which is exact.

        Returns:
            the names of the tensors that were found.
        """
        wanted = WeightManifest.FromString(manifest)
        region = WeightRegion.open_to_fill(SharedRegion(path=path, name=name), wanted.region_bytes)
        assert region is not None, "the engine holds the region meanwhile"
        specs = {spec.name: spec for spec in wanted.weights}
        found = []
        for full, tensor in self._hugging_face_weights():
            if (spec := specs.get(full)) is not None:
                weight = tensor.to("cpu", FROM_WIRE[spec.dtype]).contiguous()
                region.write(spec.offset, memoryview(_bytes_of(weight)))
                found.append(full)
        return found

    def _hugging_face_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self.model_runner.get_model().named_modules():
            own = dict(layer.named_parameters(recurse=False))
            if hasattr(layer, "cpu_linear"):
                own["weight"] = _unpacked(layer)
            parent, _, last = name.rpartition(".")
            for parameter, tensor in own.items():
                if last not in FUSED:
                    size = getattr(layer, "org_vocab_size", len(tensor))  # vocabularies are padded
                    full = f"{name}.{parameter}"
                    tail = ".".join(full.split(".")[-2:])
                    yield full.removesuffix(tail) + EXPERTS.get(tail, tail), tensor[:size]
                    continue
                fused: MergedColumnParallelLinear | QKVParallelLinear = layer
                parts = tensor.split(fused.output_sizes)
                for part_name, part in zip(FUSED[last], parts, strict=True):
                    yield f"{parent}.{part_name}.{parameter}", part

    # ----------------------------------------------------------------------- sleep, on a CPU

    def release_memory(self) -> int:
        """Release the memory of weights and KV cache; the weights are written to an unnamed file.

        Returns:
            size of the file in bytes.
        """
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed, and so removed, by restore_memory)
        self._only_packed = []
        for layer in self._packed_layers():
            if layer.weight.numel() == 0:
                weight = _unpacked(layer)
                _bytes_of(weight).tofile(self._file)
                self._only_packed.append((layer, weight.shape, weight.dtype))
            layer.cpu_linear = None
        for tensor in self._storages():
            _bytes_of(tensor).tofile(self._file)
            _drop_pages(tensor)
        for cache in self.model_runner.kv_caches:
            _drop_pages(cache)
        LIBC.malloc_trim(0)
        num_bytes: int = self._file.tell()
        return num_bytes

    def restore_memory(self) -> int:
        """Undo release_memory: the same weights, an empty cache. Returns the number of bytes read."""
        self._file.seek(0)
        for layer, shape, dtype in self._only_packed:
            layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            self._read(layer.weight.data)
        only_packed = [layer for layer, _, _ in self._only_packed]
        fresh = {layer.weight.untyped_storage().data_ptr() for layer in only_packed}
        for tensor in self._storages():
            if tensor.untyped_storage().data_ptr() not in fresh:
                self._read(tensor)
        for layer in self._packed_layers():
            _pack(layer, remove_weight=layer in only_packed)
        num_bytes: int = self._file.tell()
        self._file.close()
        return num_bytes

    def _read(self, tensor: Tensor) -> None:
        wanted = _bytes_of(tensor)
        if (read := self._file.readinto(wanted)) != wanted.nbytes:  # a full disk may not have raised an error
            raise OSError(f"the file of weights ended after {read} of {wanted.nbytes} bytes of a tensor")

    def _storages(self) -> list[Tensor]:
        """Return the memory of parameters and buffers, each storage once, as tensors of bytes."""
        model = self.model_runner.get_model()
        storages = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = torch.tensor([], dtype=torch.uint8).set_(storage)
        return list(storages.values())

    def _packed_layers(self) -> list[Any]:
        return [layer for layer in self.model_runner.get_model().modules() if hasattr(layer, "cpu_linear")]


def _bytes_of(tensor: Tensor) -> Any:
    """View a contiguous tensor's memory as an array of bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _drop_pages(tensor: Tensor) -> None:
    """Return whole pages of a tensor's memory to the system. Its address stays valid and reads as zeros."""
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _pack(layer: Any, *, remove_weight: bool) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)


def _unpacked(layer: Any, rows: int = 256) -> Tensor:
    """Compute the matrix [outputs, inputs] by which a packed layer multiplies."""
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    inputs = next(getattr(layer, size) for size in sizes if hasattr(layer, size))
    dtype = layer.weight.dtype
    columns = []
    for first in range(0, inputs, rows):
        unit = torch.eye(inputs, dtype=dtype)[first : first + rows]
        columns.append(layer.cpu_linear(unit, layer.weight, None))
    return torch.cat(columns).t().contiguous()
