"""A file is written whole, or not at all."""

import os
import stat
from pathlib import Path

import pytest

from checkpoint.files import new_file


def test_a_file_is_there_whole_or_as_it_was(tmp_path):
    file, link, folder = tmp_path / "a.json", tmp_path / "link", tmp_path / "folder"
    file.write_text("before")
    link.symlink_to(file)
    with pytest.raises(KeyboardInterrupt), new_file(file) as new:
        new.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="No such file"), new_file(file) as new:
        new.with_name("other").write_text("what a library leaves where the disk is full")
    assert file.read_text() == "before" and {*tmp_path.iterdir()} == {file, link}
    with new_file(link) as new:
        new.write_text("after")
    assert file.read_text() == "after" and link.is_symlink()
    assert {*tmp_path.iterdir()} == {file, link}
    os.mkfifo(fifo := tmp_path / "fifo")
    folder.mkdir()
    for wrong in (folder, fifo, Path("/dev/null"), tmp_path / "nowhere" / "x"):
        with pytest.raises(ValueError, match="is not a file|cannot be written"), new_file(wrong):
            pass
    assert fifo.is_fifo() and stat.S_ISCHR(os.stat("/dev/null").st_mode)
