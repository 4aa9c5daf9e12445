"""A second process of the demo answers, refuses in the parent's own words, or is known to be gone."""

import os
import pickle
import signal

import msgspec
import pytest

from layercast.demo.process import jobs, process, say
from layercast.errors import DeadlineExceeded, PeerLost, Refused

KILLED = 1 << 20


class Number(msgspec.Struct, frozen=True):
    value: int


def serve(connection, encoded):
    setup = msgspec.msgpack.decode(encoded, type=Number)
    for job in jobs(connection, Number):
        if job.value < 0:
            raise Refused(f"{job.value} is too small")
        if not job.value:
            os._exit(1)
        if job.value == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.value < setup.value:
            say(connection, Number(setup.value + job.value))


def test_a_process_answers_refuses_and_is_late_or_lost_by_name():
    with process("counting", serve, Number(40)) as child:
        child.send(Number(2))
        assert child.receive(Number, 60) == Number(42)
        child.send(Number(99))
        with pytest.raises(DeadlineExceeded, match=r"the counting process said nothing for 0\.2 s"):
            child.receive(Number, 0.2)
        child.send(Number(-3))
        with pytest.raises(Refused, match="-3 is too small"):
            child.receive(Number, 60)
        with pytest.raises(PeerLost, match="the counting process has died"):
            child.receive(Number, 60)
    with process("other", serve, Number(1)) as child:
        child.send(Number(0))
        with pytest.raises(PeerLost, match="the other process has died; its own words are above"):
            child.receive(Number, 60)
    with process("third", serve, Number(1)) as child:
        child.send(Number(KILLED))
        with pytest.raises(PeerLost, match="the third process has died; it was killed by SIGKILL; if for want of"):
            child.receive(Number, 60)


def answer_twice(connection, encoded):
    for _ in jobs(connection, Number):
        say(connection, Number(1))
        say(connection, Number(2))


def test_a_process_whose_parent_goes_with_an_answer_unread_ends_without_a_word(capfd):
    with process("talking", answer_twice, Number(0)) as child:
        child.send(Number(1))
        assert child.receive(Number, 60) == Number(1)
        assert child._connection.poll(60), "the second answer has come, and nobody reads it"
    assert capfd.readouterr().err == ""


def test_a_process_that_can_not_be_started_leaves_ctrl_c_as_it_was():
    told = signal.getsignal(signal.SIGINT)
    with pytest.raises((AttributeError, pickle.PicklingError)), process("local", lambda *_: None, Number(0)):
        raise AssertionError("a function without a name can not be sent to a process")
    assert signal.getsignal(signal.SIGINT) is told
