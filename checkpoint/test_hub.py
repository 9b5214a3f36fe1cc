"""A name leads to a folder or to one line."""

import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from checkpoint.hub import ALIASES, find_model


def test_a_folder_is_found_as_it_is_from_anywhere(tmp_path, monkeypatch):
    assert find_model(tmp_path) == tmp_path == find_model(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert find_model(f"~/{tmp_path.name}") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert (find_model("tiny") / "config.json").is_file()


def test_a_name_that_is_nothing():
    for name in ("nothing", "a/b/c", "/no/such", "~nobody-at-all/x", "\0", "./gone", "~/gone", ""):
        with pytest.raises(FileNotFoundError, match="neither a folder, nor a Hub id"):
            find_model(name)


def bare(kind: type[Exception]) -> Exception:
    """Such an error without the response of a server that it usually carries."""
    return kind.__new__(kind)


def test_what_the_hub_refuses_is_one_line_with_a_remedy(monkeypatch):
    for refusal, says in (
        (bare(errors.GatedRepoError), "gated model's licence at"),
        (bare(errors.RepositoryNotFoundError), "Check the name"),
        (errors.HFValidationError("bad"), r"refuses it \(HFValidationError: bad\)"),
        (errors.LocalEntryNotFoundError("offline"), "go online once"),
        (OSError("no route"), "go online once"),
        (RuntimeError("connection\nbroke"), r"refuses it \(RuntimeError: connection broke\)"),
        (bare(errors.HfHubHTTPError), "go online once"),
    ):
        for of_cache in (errors.LocalEntryNotFoundError("not cached"), refusal):

            def refuse(repository, local_files_only=False, **how):
                raise of_cache if local_files_only else refusal

            monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
            with pytest.raises(FileNotFoundError, match=says) as error:
                find_model("owner/name")
            assert "\n" not in str(error.value) and "owner/name" in str(error.value)


def test_an_alias_fetches_its_repository_and_an_offline_cache_works(monkeypatch, tmp_path):
    asked = []

    def offline(repository, local_files_only=False, **how):
        asked.append((repository, local_files_only))
        if not local_files_only:
            raise errors.LocalEntryNotFoundError("offline")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(FileNotFoundError):
        find_model("8B")  # the cache holds no weights: a download that was begun
    (tmp_path / "model.safetensors").touch()
    assert find_model("8B") == tmp_path
    assert asked[-2:] == [(ALIASES["8B"], False), (ALIASES["8B"], True)]


def test_only_what_is_needed_is_fetched(monkeypatch, tmp_path):
    needed = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.model",
    ]
    others = [
        "original/consolidated.00.pth",
        "original/params.json",
        "original/tokenizer.model",
        "adapter/model.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "README.md",
    ]
    fetched = []

    def download(repository, **how):
        fetched.extend(filter_repo_objects(needed + others, **how))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("owner/name") == tmp_path
    assert fetched == needed
