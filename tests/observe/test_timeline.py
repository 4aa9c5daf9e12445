import threading

from layercast.observe.timeline import OFF, SpanKind, Timeline


def test_spans_come_back_in_order_of_their_start():
    timeline = Timeline()
    timeline.record(SpanKind.LOAD, 1, 2.0, 3.0, "r", 64)
    timeline.record(SpanKind.COMPUTE, 0, 1.0, 2.0)
    assert [(span.layer, span.kind) for span in timeline.spans()] == [(0, "compute"), (1, "load")]


def test_a_full_timeline_keeps_the_newest():
    timeline = Timeline(limit=3)
    for layer in range(5):
        timeline.record(SpanKind.SAVE, layer, layer, layer + 1)
    assert [span.layer for span in timeline.spans()] == [2, 3, 4]
    timeline.clear()
    assert timeline.spans() == ()


def test_a_timeline_that_is_off_keeps_nothing():
    OFF.record(SpanKind.COMPUTE, 0, 0.0, 1.0)
    assert not OFF.on
    assert OFF.spans() == ()


def test_threads_record_side_by_side_while_one_reads():
    timeline = Timeline(limit=10_000)

    def work(thread):
        for number in range(2_000):
            timeline.record(SpanKind.LOAD, thread, number, number + 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        timeline.spans()
    for thread in threads:
        thread.join()
    assert len(timeline.spans()) == 8_000
