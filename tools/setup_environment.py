"""Makes the virtual environment .venv and installs swarmtrain into it; does nothing if that is already done.

    python3 tools/setup_environment.py          what a user needs (make demo)
    python3 tools/setup_environment.py --dev    and what the tests need (make test)

Standard library only. Before anything is fetched it says what, how much, and where from. On Linux without an
NVIDIA GPU it looks for a CPU build of torch, a tenth of the size of a CUDA build. A stamp is written last, so the
next call takes up a set-up that was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "swarmtrain-setup.json"
LOG = VENV / "swarmtrain-setup.log"
OLDEST_PYTHON = (3, 11)

# Before 23.3 a dry run of pip fetches whole wheels, only to say what it would fetch.
OLDEST_PIP = (23, 3)

# The release that the tests run with.
TESTED_TORCH = "2.13.0"
# Whoever knows a list of CPU builds, such as PyTorch's own, names its URL in this variable.
TORCH_INDEX_VARIABLE = "SWARMTRAIN_TORCH_INDEX"

# Measured on the two kinds of environment that this script makes.
UNPACKED_PER_FETCHED = {"cpu": 4.5, "cuda": 1.8}
SPARE_BYTES = 300_000_000
SIZE_QUERY_TIMEOUT_S = 5.0
HEARTBEAT_S = 30.0


class SetupError(Exception):
    """Set-up cannot go on; the message is one line for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="also install what the tests need")
    parser.add_argument(
        "--torch", choices=["auto", "cuda"], default="auto", help="cuda: this platform's usual build, GPU or not"
    )
    arguments = parser.parse_args()
    dev, cuda = bool(arguments.dev), arguments.torch == "cuda"
    try:
        _require_python()
        key = _key()
        if _is_done(key, dev):
            return 0
        with _lock():
            if not _is_done(key, dev):  # another set-up may have finished meanwhile
                _set_up(key, dev, cuda)
    except SetupError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: stopped; the next call goes on from here", file=sys.stderr)
        return 130
    return 0


# ------------------------------------------------------------------------------------------------ is it done?


def _key() -> str:
    """Returns what the environment depends on: this script, pyproject.toml, the checkout's place, the Python."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes() + b"\0")
    digest.update(f"{ROOT}\0{sys.version}".encode())
    return digest.hexdigest()


def _is_done(key: str, dev: bool) -> bool:
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp.get("key") == key and (stamp.get("dev") or not dev) and _in_venv("swarmtrain").exists())


def _require_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"this is Python {platform.python_version()}, and {wanted} or newer is needed; "
            f"name one, as in: make setup PYTHON=/usr/bin/python{wanted}"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"this Python lacks the module {error.name}; on Debian and Ubuntu: apt install python{version}-venv"
        ) from None


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Lets one set-up of this checkout run at a time, where the platform has file locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(ROOT / "pyproject.toml", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------------------------------------ the set-up


def _set_up(key: str, dev: bool, cuda: bool) -> None:
    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    _make_venv()
    _renew_pip()
    build, runtime, develop = _requirements()
    fixed = build + [r for r in runtime if not _is_torch(r)] + (develop if dev else [])
    torch = next(r for r in runtime if _is_torch(r))
    _say("looking up what is needed …")
    plan, options = _plan(fixed, torch, usual=cuda or sys.platform != "linux" or _has_nvidia_gpu())
    _announce(plan)
    if plan:
        pins = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in plan]
        _pip("install", "--no-deps", *options, *pins, slow=True)
    _pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    version = subprocess.run([_in_venv("swarmtrain"), "--version"], capture_output=True, text=True)
    if version.returncode:
        raise SetupError(f"swarmtrain was installed but does not start; see {LOG}, or remove {VENV} and try again")
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps({"key": key, "dev": dev}), encoding="utf-8")
    temporary.replace(STAMP)
    _say(f"done in {time.monotonic() - started:.0f} s: {version.stdout.strip()} in {VENV}")


def _make_venv() -> None:
    """Makes .venv, keeping one that fits: half-finished sets of packages are completed by pip."""
    if VENV.exists():
        if _venv_version() == sys.version_info[:3]:
            return
        if not (VENV / "pyvenv.cfg").exists():
            raise SetupError(f"{VENV} exists and is no virtual environment; move it away")
        _say(f"making {VENV} anew for Python {platform.python_version()}")
        shutil.rmtree(VENV)
    else:
        _say(f"making {VENV} with Python {platform.python_version()}")
    made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(f"python -m venv failed: {_last_line(made.stderr or made.stdout)}")


def _venv_version() -> tuple[int, ...] | None:
    code = "import pip, sys; print(*sys.version_info[:3], sys.prefix, sep='\\n')"
    try:
        answer = subprocess.run([_in_venv("python"), "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    *version, prefix = answer.stdout.split("\n")[:4] if answer.returncode == 0 else [""]
    return tuple(map(int, version)) if version and Path(prefix).resolve() == VENV.resolve() else None


def _renew_pip() -> None:
    text = subprocess.run([_in_venv("python"), "-m", "pip", "--version"], capture_output=True, text=True).stdout
    found = re.match(r"pip (\d+)\.(\d+)", text)
    if found and (int(found[1]), int(found[2])) < OLDEST_PIP:
        _say(f"fetching a newer pip (about 2 MB; this one is {found[1]}.{found[2]})")
        _pip("install", "--upgrade", "pip>=" + ".".join(map(str, OLDEST_PIP)))


def _requirements() -> tuple[list[str], list[str], list[str]]:
    """Returns the requirements to build, to run and to develop, as pyproject.toml has them."""
    import tomllib

    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    develop = [r for r in project["dependency-groups"]["dev"] if isinstance(r, str)]
    return project["build-system"]["requires"], project["project"]["dependencies"], develop


def _is_torch(requirement: str) -> bool:
    return re.match(r"torch\b", requirement) is not None


# ------------------------------------------------------------------------------------------------ what to fetch

Item = dict[str, Any]  # one entry of pip's installation report
Plan = list[Item]


def _plan(fixed: list[str], torch: str, *, usual: bool) -> tuple[Plan, list[str]]:
    """Returns what pip would install, and the options it needs for that.

    ``usual``: the platform's usual torch is right, as with an NVIDIA GPU. Else the first CPU build wins; if there is
    none, the first build at all.
    """
    if usual:
        return _resolve([*fixed, torch], []), []
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    candidates = [
        (f"torch=={TESTED_TORCH}", []),
        (f"torch=={TESTED_TORCH}+cpu", ["--extra-index-url", index] if index else []),
        (torch, []),
    ]
    fallback, failure = None, None
    for requirement, options in candidates:
        try:
            plan = _resolve([*fixed, requirement], options)
        except SetupError as error:
            failure = failure or error
            continue
        if not _cuda_packages(plan):
            return plan, options
        fallback = fallback or (plan, options)
    if fallback is None:
        raise failure or SetupError("torch cannot be had")
    _say(
        "no CPU build of torch for this Python is to be had here; taking the CUDA build, which also runs on a CPU "
        f"(to avoid it, set {TORCH_INDEX_VARIABLE} to the URL of PyTorch's list of CPU builds)"
    )
    return fallback


def _resolve(requirements: list[str], options: list[str]) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        _pip("install", "--dry-run", "--report", str(report), *options, *requirements)
        plan: Plan = json.loads(report.read_text(encoding="utf-8"))["install"]
    return plan


def _cuda_packages(plan: Plan) -> list[str]:
    names = [item["metadata"]["name"].lower() for item in plan]
    return [name for name in names if name.startswith(("nvidia-", "cuda-")) or name == "triton"]


def _has_nvidia_gpu() -> bool:
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    if not shutil.which("nvidia-smi"):
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
        return answer.returncode == 0 and "GPU" in answer.stdout
    return False


def _announce(plan: Plan) -> None:
    """Says what will be fetched and how large it is, and refuses where the disk is too small."""
    if not plan:
        _say("all packages are there")
        return
    with ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(_size_bytes, (item["download_info"]["url"] for item in plan)))
    remote = [s for s, item in zip(sizes, plan, strict=True) if not item["download_info"]["url"].startswith("file:")]
    fetched, known = sum(s for s in remote if s), sum(s for s in sizes if s)
    unknown = sum(s is None for s in sizes)
    unpacked = known * UNPACKED_PER_FETCHED["cuda" if _cuda_packages(plan) else "cpu"]
    _say(
        f"about to install {len(plan)} packages, {_mb(known)}"
        + (f" and {unknown} of unknown size" if unknown else "")
        + f": {_mb(fetched)} from the network, {_mb(known - fetched)} from this disk;"
        + f" unpacked about {_mb(unpacked)}"
    )
    largest = sorted(zip(sizes, plan, strict=True), key=lambda pair: -(pair[0] or 0))[:5]
    _say("  largest: " + ", ".join(f"{_title(item)} {_mb(size)}" for size, item in largest if size))
    for item in plan:
        if item["metadata"]["name"].lower() == "torch":
            cuda = _cuda_packages(plan)
            kind = f"a CUDA build, with {len(cuda)} packages of CUDA libraries" if cuda else "a CPU build"
            _say(f"  torch is {kind if sys.platform == 'linux' else 'the build for this platform'}")
    free = shutil.disk_usage(ROOT).free
    if free < unpacked + SPARE_BYTES:
        raise SetupError(f"not enough disk: about {_mb(unpacked + SPARE_BYTES)} are needed in {ROOT}, {_mb(free)} free")


def _size_bytes(url: str) -> int | None:
    try:
        if url.startswith("file:"):
            return os.stat(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)).st_size
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "swarmtrain-setup"})
        with urllib.request.urlopen(request, timeout=SIZE_QUERY_TIMEOUT_S) as answer:
            length = answer.headers.get("Content-Length")
            return int(length) if length else None
    except (OSError, ValueError):
        return None


def _title(item: Item) -> str:
    return f"{item['metadata']['name']} {item['metadata']['version']}"


def _mb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 999.5e6 else f"{size / 1e6:.0f} MB" if size >= 1e6 else "under 1 MB"


# ------------------------------------------------------------------------------------------------ running pip

_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name|Name or service not known|ConnectTimeout"
    r"|Network is unreachable|Max retries exceeded|ProxyError|Read timed out|Connection (?:refused|reset|aborted)"
)


def _pip(*arguments: str, slow: bool = False) -> None:
    """Runs the environment's pip; its output goes to the log, and on a terminal a slow call shows pip's progress."""
    command = [
        str(_in_venv("python")), "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "2",
        *arguments,
    ]  # fmt: skip
    show = slow and sys.stdout.isatty()
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"$ pip {' '.join(arguments)}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(command, stdout=None if show else log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _wait(process, quiet=show or not slow)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        output = LOG.read_bytes()[start:].decode("utf-8", "replace")
        raise SetupError(_explain(output))


def _wait(process: subprocess.Popen[bytes], *, quiet: bool) -> None:
    started = time.monotonic()
    while True:
        try:
            process.wait(HEARTBEAT_S)
            return
        except subprocess.TimeoutExpired:
            if not quiet:
                _say(f"installing, {time.monotonic() - started:.0f} s so far …")


def _explain(output: str) -> str:
    if "No space left on device" in output:
        return f"the disk is full; free some space and try again ({LOG})"
    missing = re.findall(r"No matching distribution found for (\S+)", output)
    if _NO_NETWORK.search(output):
        return f"the package index cannot be reached; check the network connection and try again ({LOG})"
    if missing:
        build = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform} {platform.machine()}"
        return f"there is no {missing[-1]} for {build} ({LOG})"
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return f"pip failed: {_last_line(errors[-1] if errors else output)} ({LOG})"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def _in_venv(program: str) -> Path:
    return VENV / ("Scripts" if os.name == "nt" else "bin") / program


def _say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
