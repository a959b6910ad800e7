"""What a plan has become for the copy, kept from one save to the next of the same structure.

With guarded optimizers it is divided: what has to be copied at once, and what beside training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from ckpipe.format.data_file import Cargo
from ckpipe.lock.late_copies import (
    ByteSample,
    OwnedFacts,
    owned_leaves,
    owned_tensors,
    worth_watching,
)
from ckpipe.plan.plan import RankPlan
from ckpipe.saves.copying import BlockPlan, split_block, tensors_of
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import TensorLeaf


@dataclass(frozen=True, slots=True)
class Program:
    """A plan with the blocks that carry it out; serves every save of the same structure.

    Args:
        plan: The plan.
        blocks: What fills which block.
        cargo: What the rank brings to the store.
        planner: The class of the planner, for the manifest.
    """

    plan: RankPlan
    blocks: tuple[BlockPlan, ...]
    cargo: Cargo
    planner: str


@dataclass(frozen=True, slots=True)
class Division:
    """What a save copies before it returns, and what it copies while training goes on.

    Args:
        leaves: The leaves of the state that was divided.
        program: The program whose blocks were divided.
        facts: What was known of the tensors that optimizers own; None if not enough.
        owned: The numbers of the leaves that are copied later, in order.
        halves: For each block, its work before and after.
        samples: For each block, of what is copied after; it tells if that was changed before.
        worth: False if all is copied before, whatever optimizers own.
    """

    leaves: list[TensorLeaf]
    program: Program
    facts: OwnedFacts | None = None
    owned: list[int] = field(default_factory=list)
    halves: list[tuple[BlockPlan, BlockPlan]] = field(default_factory=list)
    samples: list[ByteSample] = field(default_factory=list)
    worth: bool = True

    @property
    def all_later(self) -> bool:
        """Whether nothing has to be copied before training goes on."""
        return bool(self.owned) and not any(at_once.steps for at_once, _ in self.halves)

    def serves(self, captured: Captured, program: Program, owners: Sequence[Optimizer]) -> bool:
        """Whether another save would be divided just so.

        Args:
            captured: Its state.
            program: Its program.
            owners: The optimizers that own some of it now.
        """
        if self.leaves is not captured.tensors or self.program is not program:
            return False
        if not self.worth:
            return True
        facts = self.facts
        return facts is not None and facts.hold(owned_tensors(owners), captured.objects)


def divide(captured: Captured, program: Program, owners: Sequence[Optimizer]) -> Division:
    """Divides a save's work: what optimizers own is copied later, if that is worth it.

    Args:
        captured: The state, with the objects that the walk has met.
        program: Its program.
        owners: The optimizers.
    """
    tensors = owned_tensors(owners)
    owned = owned_leaves(captured.tensors, tensors)
    if not worth_watching([captured.tensors[number] for number in owned]):
        return Division(captured.tensors, program, worth=False)
    halves = [split_block(plan, owned) for plan in program.blocks]
    try:
        facts = OwnedFacts(tensors, captured.objects)
    except RuntimeError:  # such as that there are no strides
        facts = None
    samples = [ByteSample(captured.tensors, tensors_of(later)) for _, later in halves]
    return Division(captured.tensors, program, facts, sorted(owned), halves, samples)


__all__ = ["Division", "Program", "divide"]
