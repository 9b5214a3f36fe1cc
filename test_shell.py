"""A mistake is one line on standard error and status 2; what is nobody's mistake keeps its traceback."""
import pytest

from shell import Parser, status


def raising(error: BaseException) -> None:
    raise error


def test_the_status_says_how_it_went(capsys):
    assert status(lambda: 3) == 3 and status(lambda: print("done")) == 0 and capsys.readouterr() == ("done\n", "")
    for error, kinds in ((ValueError("it is 3:\n  it must be 4"), ()), (FileNotFoundError(2, "No such file", "x"), ()), (KeyError("x"), (KeyError,))):
        assert status(lambda: raising(error), *kinds) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert status(lambda: raising(KeyboardInterrupt()), interrupted="stopped") == 130 and capsys.readouterr() == ("", "stopped\n")
    assert status(lambda: raising(KeyboardInterrupt())) == 130 and capsys.readouterr() == ("", "")
    with pytest.raises(ZeroDivisionError):
        status(lambda: 1 // 0)


def test_a_flag_that_is_not_there_is_one_line(capsys):
    parser = Parser("it.py", "Does it.")
    parser.add_argument("--count", type=int)
    assert parser.parse_args(["--count", "3"]).count == 3
    for flags in (["--count", "x"], ["--cou", "3"], ["more"]):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(flags)
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and not out and err.startswith("error: ") and err.endswith("(see --help)\n") and err.count("\n") == 1
