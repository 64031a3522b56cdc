"""The member loop: owns a group member, calls the engine, carries out its commands."""
