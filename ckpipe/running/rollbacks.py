"""The name of the next save, which all ranks give it alike."""

from __future__ import annotations

from ckpipe.ranks.agree import agree
from ckpipe.ranks.launch import Course
from ckpipe.save.context import Site
from ckpipe.types import CheckpointId


def name_at_once(site: Site, course: Course, step: int) -> CheckpointId | None:
    """Names a save like :func:`next_name`; None if other ranks have to be asked.

    Args:
        site: Where it is saved.
        course: What was saved before; changed, unless there is no name.
        step: The step.
    """
    if course.lies_back(step):
        if site.world_size > 1:
            return None
        if course.has_loaded:
            course.go_back()
    return course.name(step)


async def next_name(site: Site, course: Course, step: int) -> CheckpointId:
    """Names a save that begins now, newer than all others if the run went back for it.

    Costs nothing, but for a save of several ranks whose step lies before an earlier one's: then the
    first that comes to it decides whether the run went back, since perhaps only some have loaded.

    Args:
        site: Where it is saved.
        course: What was saved before; changed.
        step: The step.

    Raises:
        StoreError: If ranks have to agree and the store failed.
    """
    name = name_at_once(site, course, step)
    if name is not None:
        return name
    before, went_back = course.rollbacks, course.has_loaded
    question = f"back-{before}-{step}-{course.count(step)}"
    went_back = bool(await agree(site.patient, site.attempt, question, went_back))
    if went_back and course.rollbacks == before:
        course.go_back()
    return course.name(step)


__all__ = ["name_at_once", "next_name"]
