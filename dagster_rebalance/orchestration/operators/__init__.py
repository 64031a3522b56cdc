"""Operations of people: directives, reruns, and a snapshot of a group."""
