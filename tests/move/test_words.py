import threading
import time

import numpy as np

from layercast.move.words import DROPPED, post, sleep_on


def test_a_sleeper_wakes_when_its_word_is_posted_and_no_other():
    words, woken = np.zeros(3, np.int32), []
    sleepers = [threading.Thread(target=lambda i=i: woken.append((i, sleep_on(words, i, 10)))) for i in range(3)]
    for sleeper in sleepers:
        sleeper.start()
    post(words, 1)
    sleepers[1].join(10)
    assert woken == [(1, True)]
    assert words.tolist() == [0, 1, 0]
    post(words, 0)
    post(words, 2, DROPPED)
    for sleeper in sleepers:
        sleeper.join(10)
    assert sorted(woken) == [(0, True), (1, True), (2, True)]
    assert words.tolist() == [1, 1, 2]


def test_sleeping_ends_by_the_deadline():
    started = time.monotonic()
    assert not sleep_on(np.zeros(1, np.int32), 0, 0.05)
    assert 0.04 < time.monotonic() - started < 5
