"""Lines of the file of settings (TOML)."""

import json


def line(key: str, value: object) -> str:
    """Returns the line of a setting that `Config.as_dict` has. JSON's texts, numbers and lists are
    TOML's, but for pairs of surrogates: what can be printed stands as it is."""
    text = json.dumps(value, ensure_ascii=False)
    return f"{key} = {text if text.isprintable() else json.dumps(value)}"
