"""Show each row of results under its prompt.

python -m jaxstate.serve demo -i PROMPTS | python examples/show.py PROMPTS
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main(prompts: Path) -> None:
    lines = prompts.read_text(encoding="utf-8").split("\n")
    console = Console(highlight=False)
    for result in map(json.loads, sys.stdin):
        prompt = json.loads(lines[result["line"] - 1])["prompt"]
        console.rule(f"[bold]{result['id']}[/]", align="left")
        if "error" in result:
            console.print(Text(f"{result['error']['code']}: {result['error']['message']}", "red"))
        else:
            console.print(Text.assemble((prompt, "bold"), result["text"]))
            usage = result["usage"]
            console.print(
                Text(f"{usage['completion_tokens']} tokens, {result['finish_reason']}", "dim")
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
