"""The guided tour: a list of stops, each shows commands as a user types them and checks what they did."""
