"""`pawl doctor`: why nothing is learned, and what to do."""

import asyncio
import sys
from collections.abc import Sequence

from rich.table import Table

from pawl.commands.common import AsJson, OfTenant, make_table, write_lines
from pawl.doctor.checks import Finding
from pawl.doctor.diagnosis import diagnose
from pawl.settings import DoctorSettings, UnreadSettings, read_settings


def doctor(tenant: OfTenant = None, as_json: AsJson = False) -> None:
    """Say why nothing is learned, and what to do; the cause most upstream comes first.

    Asks the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR, if it runs), the proxy,
    the trainer, the controller, the model servers and the disks, all at once, and changes nothing.
    A part that does not answer is reported as a finding. If processes run on other machines, set
    PAWL_ADMIN_LISTEN, PAWL_TRAINER_LISTEN and PAWL_CONTROLLER_LISTEN to their addresses; a proxy
    that needs keys shows its metrics only if PAWL_API_KEY has the scope read. Figures are of the
    newest calls and episodes.

    Status 1: something needs a person (`!`). What is marked with `·` passes by itself. The last
    lines are the policies' outlooks: how many episodes count towards an update, and when the next
    one comes.
    """
    try:
        found = asyncio.run(diagnose(read_settings(DoctorSettings), tenant=tenant))
    except UnreadSettings as error:
        found = [
            Finding(
                title="A setting cannot be used",
                figures={"error": str(error)},
                remedy="correct what the error names",
            )
        ]
    if found:
        write_lines(found, findings_table, as_json=as_json)
    if any(one.needs_person for one in found):
        raise SystemExit(1)
    print("nothing to do", file=sys.stderr)


def findings_table(findings: Sequence[Finding]) -> Table:
    rows = []
    for one in findings:
        since = f" (since {one.since.astimezone():%Y-%m-%d %H:%M})" if one.since else ""
        figures = ", ".join(f"{name}: {value}" for name, value in one.figures.items())
        lines = [one.title + since, figures, f"→ {one.remedy}"]
        mark = "!" if one.needs_person else " " if one.is_outlook else "·"
        rows.append((mark, "\n".join(filter(None, lines))))
    return make_table(("", "what is wrong, and what to do"), rows)
