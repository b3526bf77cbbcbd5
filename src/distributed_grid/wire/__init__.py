"""How our processes talk: framed channels (sealed over TCP, plain over a unix socket) and calls over them."""
