"""Access to the Hub without a connection, or with a wrong address."""

from file_server import send, serve

from common.hub import is_reachable


def test_wrong_hub_counts_as_unreachable():
    """As that of a network with a page for logins, or HF_ENDPOINT without https://."""
    with serve(send(b"welcome\r\n\r\n")) as url:
        assert not is_reachable(url)
    assert not is_reachable("hf-mirror.com")
