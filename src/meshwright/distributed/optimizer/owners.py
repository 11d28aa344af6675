"""Compute on whole matrices whose parts or copies lie on several ranks: each on one rank, its owner.

Parts travel to the owners in one all-to-all for many matrices, and what owners computed travels back in another.
Planning decides the owners and the order (``planning/optimizer_collectives``).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError
from meshwright.distributed.exchange import ProcessGroupRanks
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.torch_private import flattened, local_part, ranks_in
from meshwright.distributed.weights.shards import pieces, runs_at
from meshwright.planning.optimizer_collectives import Box, Matrix, Transfer, boxes_of, matrices_of, rounds_of

Compute = Callable[[Tensor], Tensor]
"""A function of a whole (rows, columns) matrix that returns one of the same shape and dtype."""
Boxes = dict[tuple[int, Box], Tensor]
"""Parts of matrices, by the matrix's number."""


@dataclass(frozen=True)
class _Message:
    """The boxes that this rank sends and receives in one all-to-all, by receiver and by sender.

    ``travels``: whether any rank sends one.
    """

    mine: tuple[Transfer, ...]
    theirs: tuple[Transfer, ...]
    travels: bool

    @classmethod
    def of(cls, transfers: Iterable[Transfer], here: int) -> _Message:
        mine, theirs, travels = [], [], False
        for transfer in transfers:
            travels = True
            if transfer.sender == here:
                mine.append(transfer)
            elif transfer.receiver == here:
                theirs.append(transfer)
        mine.sort(key=lambda transfer: transfer.receiver)
        theirs.sort(key=lambda transfer: transfer.sender)
        return cls(tuple(mine), tuple(theirs), travels)

    def send(self, ranks: ProcessGroupRanks | None, part_of: Callable[[int, Box], Tensor], like: Tensor) -> Boxes:
        """Send boxes, and return those received."""
        if ranks is None or not self.travels:
            return {}
        sends, receives = [0] * ranks.size, [0] * ranks.size
        for transfer in self.mine:
            sends[transfer.receiver] += transfer.held.elements
        for transfer in self.theirs:
            receives[transfer.sender] += transfer.held.elements
        parts = [part_of(transfer.matrix, transfer.held.box).reshape(-1) for transfer in self.mine]
        buffer = torch.cat(parts) if parts else like.new_empty(0)
        runs = ranks.trade(buffer, sends, receives).split([transfer.held.elements for transfer in self.theirs])
        boxes = [(transfer.matrix, transfer.held.box) for transfer in self.theirs]
        return {
            (number, box): run.view([high - low for low, high in box])
            for (number, box), run in zip(boxes, runs, strict=True)
        }


@dataclass(frozen=True)
class _Round:
    """(number of a matrix, its owner), the message to the owners, and the message from them."""

    owners: tuple[tuple[int, int], ...]
    arriving: _Message
    leaving: _Message


@dataclass(frozen=True)
class _Schedule:
    """The work on some tensors.

    Attributes:
        first: number of each tensor's first matrix.
        tensor_of: each matrix's tensor.
    """

    matrices: tuple[Matrix, ...]
    first: tuple[int, ...]
    tensor_of: tuple[int, ...]
    rounds: tuple[_Round, ...]


class MatrixOwners:
    """The ranks that hold parts or copies of the same matrices, and compute each matrix once among them.

    Args:
        mesh: all axes over which matrices are cut or copied, and the pipeline's, whose ranks have other matrices; None:
            this process alone.
    """

    def __init__(self, mesh: DeviceMesh | None):
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if mesh is not None and not names and mesh.ndim > 1:
            raise ConfigError(
                f"Muon: the mesh of shape {tuple(mesh.shape)} has no axis names, by which its ranks are found: give"
                f" mesh_dim_names= to it"
            )
        if mesh is not None and names:
            sizes = zip(names, mesh.shape, strict=True)
            large = tuple(name for name, size in sizes if size > 1 and name != Axis.PP.value)
            mesh = mesh[large] if large else None
        flat = flattened(mesh, "_".join(mesh.mesh_dim_names or ())) if mesh is not None and mesh.ndim > 1 else mesh
        self._group = None if flat is None or flat.size() == 1 else flat.get_group()
        self._ranks = None if self._group is None else ProcessGroupRanks(self._group)
        alone = [get_world_info()[0]]
        self._order = alone if self._group is None else dist.get_process_group_ranks(self._group)
        self._where = {alone[0]: ()} if mesh is None or self._group is None else _coordinates(mesh)
        self._schedules: dict[tuple, _Schedule] = {}
        self._known: dict[tuple, list[Matrix]] = {}

    def compute(self, tensors: Sequence[Tensor], functions: Sequence[Compute]) -> None:
        """Replace the matrices of each tensor by its function of them, in place. Collective.

        Args:
            tensors: of one dtype, (rows, columns) or (experts, rows, columns), plain or DTensors, in the same order on
                all ranks.
        """
        if not tensors:
            return
        key, like = tuple(_place_of(tensor) for tensor in tensors), local_part(tensors[0])
        if key not in self._schedules:
            each = [self._matrices(tensor) for tensor in tensors]
            matrices = tuple(chain.from_iterable(each))
            first = tuple(accumulate((len(numbers) for numbers in each), initial=0))[:-1]
            rounds = []
            for one in rounds_of(matrices, len(self._order)):
                arriving = _Message.of(one.brought(matrices), self._here)
                rounds.append(_Round(one.owners, arriving, _Message.of(one.returned(matrices), self._here)))
            tensor_of = tuple(place for place, numbers in enumerate(each) for _ in numbers)
            self._schedules[key] = _Schedule(matrices, first, tensor_of, tuple(rounds))
        schedule = self._schedules[key]
        held: dict[tuple[int, Box], Tensor] = {}  # views of what this rank holds, by matrix and box
        for first, tensor in zip(schedule.first, tensors, strict=True):
            for piece in pieces(tensor):
                (*stack, top, left), local = piece.offset, piece.local
                box = ((top, top + local.shape[-2]), (left, left + local.shape[-1]))
                for number, matrix in enumerate(local if stack else [local], first + (stack[0] if stack else 0)):
                    held[number, box] = matrix
        for one in schedule.rounds:  # parts to the owners, the functions, and the results to all who hold a box of them
            there = ChainMap(one.arriving.send(self._ranks, lambda *at: held[at], like), held)
            found: dict[int, Tensor] = {}
            for number in (number for number, owner in one.owners if owner == self._here):
                matrix = schedule.matrices[number]
                parts = [(boxes.box, there[number, boxes.box]) for boxes in matrix.boxes]
                whole = parts[0][1]  # a view, where it is one box
                if len(parts) > 1:
                    whole = whole.new_empty(matrix.rows, matrix.columns)
                    for box, part in parts:
                        _part(whole, box).copy_(part)
                found[number] = functions[schedule.tensor_of[number]](whole)
            back = one.leaving.send(self._ranks, lambda number, box, found=found: _part(found[number], box), like)
            for number, _ in one.owners:
                for box in (boxes.box for boxes in schedule.matrices[number].boxes):
                    if (number, box) in held:
                        held[number, box].copy_(_part(found[number], box) if number in found else back[number, box])

    @property
    def _here(self) -> int:
        return 0 if self._ranks is None else self._ranks.rank

    def _matrices(self, tensor: Tensor) -> list[Matrix]:
        """List the matrices of a tensor, each with its boxes on the ranks of the group, in their order."""
        key = _place_of(tensor)
        if key in self._known:
            return self._known[key]
        boxes: list[list[Box]] = [[tuple((0, size) for size in tensor.shape)]] * len(self._order)
        if isinstance(tensor, DTensor):
            own = _coordinates(tensor.device_mesh)
            if beyond := own.keys() - self._where.keys():
                raise ConfigError(
                    f"Muon: a matrix of shape {tuple(tensor.shape)} lies on the ranks {sorted(own)}, and matrices are"
                    f" shared out among {sorted(self._where)}, without {sorted(beyond)}: give the mesh of all of them"
                    f" to share_out"
                )
            # along the axes that the tensor's mesh does not have, ranks hold copies
            places = [self._where[rank] for rank in own]
            axes = [axis for axis in range(len(places[0])) if len({place[axis] for place in places}) > 1]
            known = {tuple(self._where[rank][axis] for axis in axes): where for rank, where in own.items()}
            at = [known[tuple(self._where[rank][axis] for axis in axes)] for rank in self._order]
            boxes = [boxes_of(runs_at(tensor, where)) for where in at]
        self._known[key] = matrices_of(tensor.shape, boxes)
        return self._known[key]


def _coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Map the ranks of a mesh to their places on it."""
    places = product(*(range(size) for size in mesh.shape))
    return dict(zip(ranks_in(mesh).flatten().tolist(), places, strict=True))


def _place_of(tensor: Tensor) -> tuple:
    # by words: cuts into several parts have no hash
    where = (tensor.device_mesh, *map(repr, tensor.placements)) if isinstance(tensor, DTensor) else ()
    return (*where, tuple(tensor.shape))


def _part(matrix: Tensor, box: Box) -> Tensor:
    (top, bottom), (left, right) = box
    return matrix[top:bottom, left:right]
