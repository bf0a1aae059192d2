"""A wheel of the tree works where there is no checkout."""

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("cli", "gateway", "gds", "kvfs", "s3api")


def product() -> list[str]:
    """The files of the product that git has, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def build(target: Path) -> Path:
    """Builds from a copy: pip leaves its build folders there."""
    source = target / "source"
    for name in (*product(), "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(target), str(source)], check=True)
    (wheel,) = target.glob("kvfs-*.whl")
    return wheel


def test_a_wheel_holds_the_product_alone_and_serves(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == set(product())

    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", wheel], check=True)
    # What it requires comes from this environment; its own packages stand before ours.
    (installed,) = environment.glob("lib/python*/site-packages")
    (installed / "required.pth").write_text("\n".join(site.getsitepackages()))
    kvfs = str(environment / "bin/kvfs")
    place = ["--store", str(tmp_path / "store"), "--mount", str(tmp_path / "mnt")]
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KVFS_CONFIG": os.devnull}
    asked = "import cli.main, gateway, gds, kvfs, s3api; print(cli.main.__file__, kvfs.__file__)"
    script = f"""
        set -eu
        {environment}/bin/python -c '{asked}'
        {kvfs} up --daemon --s3 127.0.0.1:0 --admin off {" ".join(place)}
        echo content > {tmp_path}/mnt/models/file
        {kvfs} stat /models/file {" ".join(place[:2])}
        {kvfs} doctor {" ".join(place[:2])} > /dev/null
        {kvfs} completion bash | grep -q _KVFS_COMPLETE
        {kvfs} down {" ".join(place)}
        {environment}/bin/mount.kvfs --help > /dev/null
        {kvfs} setup --dry-run --root {tmp_path} | grep -q 'ExecStart={kvfs} up'
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd="/", env=variables, capture_output=True, text=True
    )
    if done.returncode:
        subprocess.run([kvfs, "down", *place], env=variables, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(str(installed) in word for word in done.stdout.split()[:2])
