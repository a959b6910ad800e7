"""Link the repository and the source of each page, and keep names whole; a hook of mkdocs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Link the repository that the pages are built from, and its files, where it has an address."""
    if not Path(config["config_file_path"]).with_name(".git").exists():  # from an sdist
        return config
    asked = ("git", "remote", "get-url", "origin")
    remote = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if address := web_address(remote):
        config["repo_url"], config["repo_name"] = address, address.split("/", 3)[3]
        config["edit_uri"] = "edit/main/docs/"
    return config


def web_address(remote: str) -> str | None:
    """Return the page of a git remote, without credentials, or None if it has none."""
    found = re.fullmatch(
        r"(?:https://(?:[^@/]*@)?|ssh://(?:\w+@)?|\w+@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote
    )
    return f"https://{found[1]}/{found[2]}" if found else None


def on_page_content(html: str, **_: Any) -> str:
    """Mark short names, so that no line of a table ends after the hyphens of an option."""
    return re.sub(r"<code>([^<]{1,24})</code>", r'<code class="whole">\1</code>', html)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the theme from asking the host of the repository for its stars, for each reader."""
    return output.replace(' data-md-component="source"', "")
