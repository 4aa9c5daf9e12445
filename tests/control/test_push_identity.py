"""Two engines whose KV differs in anything refuse a push by the name of what differs, before a byte moves."""

import msgspec
import pytest
from push_sides import LAYERS, OURS, SPECS, THEIRS, TOKENS, send, sides, until

from layercast.control.push_states import PushState
from layercast.errors import LayercastError, LayoutMismatch
from layercast.flow.orders import ReceiveOrder
from layercast.spec.keys import Identity

OTHER = {"block_size": 32, "dtypes": (("kv", "float8_e4m3fn"),)}


@pytest.mark.parametrize("field", Identity.__struct_fields__)
@pytest.mark.parametrize("group", range(len(SPECS)))
def test_each_field_alone_is_refused_by_name(field, group):
    """vLLM#55776, #42895, #49230: revisions, block sizes or draft models differed, the handshake passed, text broke."""
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        identities = list(ticket.identities)
        identities[group] = msgspec.structs.replace(identities[group], **{field: OTHER.get(field, "other")})
        with pytest.raises(LayoutMismatch, match=field):
            prefill.node.source.accept(msgspec.structs.replace(ticket, identities=tuple(identities)))
        prefill.node.source.accept(ticket)
        prefill.node.source.cancel(ticket.transfer, "the test is over")


def test_a_group_that_one_side_lacks_is_refused():
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        with pytest.raises(LayoutMismatch):
            prefill.node.source.accept(msgspec.structs.replace(ticket, identities=ticket.identities[:1]))


@pytest.mark.parametrize("fails_at", [0, 2, 5])
def test_a_write_that_can_not_be_posted_fails_the_receiver_at_once(monkeypatch, fails_at):
    """vLLM#50754: the sender only logged it, and the receiver counted towards a number never reached."""
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
        post, calls = prefill.node._transport.post, []

        def sometimes(*args, **how):
            calls.append(args)
            if len(calls) == fails_at + 1:
                raise LayercastError("no more memory to post with")
            return post(*args, **how)

        monkeypatch.setattr(prefill.node._transport, "post", sometimes)
        send(prefill, ticket, OURS)
        with pytest.raises(LayercastError, match="no more memory"):
            flights[LAYERS - 1].wait(5)
        assert len(TOKENS) == ticket.tokens
        until(lambda: decode.node.target.push(ticket.transfer).quiet)
        assert decode.node.target.push(ticket.transfer).state is PushState.ABORTED
