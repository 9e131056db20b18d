//! The tidepool binary: node, gRPC, admin HTTP, CLI.
