"""What every gRPC process shares: server bootstrap, channel options, status mapping, array codec."""
