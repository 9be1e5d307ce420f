"""Options of users, validated once."""
