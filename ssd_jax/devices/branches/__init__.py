"""The draft of SSD: branches off records, one for each outcome that is prepared for."""
