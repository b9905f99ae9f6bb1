"""An installed library that is too old is named, before the import of a name that it lacks."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from pods_rl.engines import versions


@pytest.mark.parametrize(
    ("library", "version", "too_old"),
    [("trl", "1.12.0", True), ("transformers", "5.2.0", True), ("trl", "1.15.0", False), ("peft", "9.0.0", False)],
)
def test_an_old_library_is_refused_by_its_name_and_with_what_to_install(tmp_path, library, version, too_old):
    metadata = tmp_path / f"{library}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pods_rl.engines import versions as v\n{ASK}"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert (f"{library} {version}" in done.stdout) == too_old, done.stderr
    assert (f"pip install '{library}<" in done.stdout or f"pip install '{library}>" in done.stdout) == too_old


def test_a_folder_on_the_path_has_no_metadata_and_no_versions_to_check(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", missing)
    versions.check_versions.__wrapped__()


ASK = """
try:
    v.check_versions()
except ImportError as error:
    print(error)
"""
